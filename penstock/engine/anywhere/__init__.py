"""Reuse anywhere: KV of a segment of a prompt is used wherever the segment stands."""
