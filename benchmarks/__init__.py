"""Benchmarks. Each prints its result, the limit or peer measured in the same run, and the ratio."""
