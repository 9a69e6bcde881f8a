"""Transfers: the only part that takes time. Orders in, outcomes out, threads between."""
