"""OpenAI's wire format over the embedded engine."""
