"""Decides whether to load blocks or compute them, from measured rates. Pure."""

from penstock.costs.rates import LinkRate, PrefillRate, break_even_tokens

__all__ = ["LinkRate", "PrefillRate", "break_even_tokens"]
