"""Sizing moved to `penstock.shapes.sizing`. This path stays for one release."""

from penstock.shapes.sizing import PRESETS, find_shape

__all__ = ["PRESETS", "find_shape"]
