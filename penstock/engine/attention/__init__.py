"""Attention over the paged pool, one file a kernel."""
