"""Penstock inside and below other engines."""
