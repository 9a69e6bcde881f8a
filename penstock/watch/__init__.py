"""Reads the metrics of a running server, summarizes them, and gives advice."""
