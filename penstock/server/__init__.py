"""The OpenAI-compatible server over the embedded engine, and its dashboard."""
