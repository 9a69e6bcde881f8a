"""Other systems to compare with, run by their own interpreters."""
