"""The catalog moved to `penstock.shapes.catalog`. This path stays for one release."""

from penstock.shapes.catalog import GPUS, MODELS, find_gpu, find_model

__all__ = ["GPUS", "MODELS", "find_gpu", "find_model"]
