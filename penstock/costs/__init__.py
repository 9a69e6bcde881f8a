"""Load or compute: measured rates in, a decision out. Pure."""

from penstock.costs.rates import LinkRate, PrefillRate, break_even_tokens

__all__ = ["LinkRate", "PrefillRate", "break_even_tokens"]
