"""One cache for a machine: a process that owns DRAM, disk and remote tiers, and its clients.

May import everything up to `offload` and `build`. The engine and the connectors use its client.
"""
