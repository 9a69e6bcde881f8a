"""Tools: how models write calls, and how calls become OpenAI's. Imports no engine."""
