"""Attention over the paged pool, one file per kind of kernel."""
