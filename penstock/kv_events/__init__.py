"""Tells routers which blocks this engine holds, and in which tier, in vLLM's format.

Imports the ground floor. `held` is pure, `wire` packs, `publisher` owns the sockets and a thread.
"""
