"""Transfers: queues and threads that move blocks between tiers, and report the outcomes."""
