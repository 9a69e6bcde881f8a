"""Stores: they read and write the bytes of blocks. `books` decides which block goes where."""
