"""Measures this machine's links: memory, disk and remote store. For `penstock probe`."""
