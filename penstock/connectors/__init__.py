"""Penstock inside other engines."""
