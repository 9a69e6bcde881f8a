"""Benchmarks. Each prints its limit or peer beside it, from the same run, and the ratio."""
