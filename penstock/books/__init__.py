"""The books: which block is where, and what happens to it next.

Pure: no I/O, no threads, no clock. They import only `policies` and the modules at the top level.
"""
