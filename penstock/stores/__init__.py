"""Stores: bytes in, bytes out, no policy. Which block lies where is the books' affair."""
