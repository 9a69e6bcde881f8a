"""The options moved to `penstock.config.options`. This path stays for one release."""

from penstock.config.options import EngineOptions

__all__ = ["EngineOptions"]
