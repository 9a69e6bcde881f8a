"""The name of Penstock's distribution, and what to say if an optional package is missing.

The import is `penstock`, the distribution `penstock-kv`: on PyPI another project is `penstock`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from penstock.errors import NotInstalled

VERSION = "0.1.0"
DISTRIBUTION = "penstock-kv"
_WHEEL = f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"

# What importing the embedded engine needs. It imports numba and gguf only when it uses them.
ENGINE = ("torch", "transformers", "numpy", "safetensors")
SERVER = ("fastapi", "uvicorn", "pydantic")
KV_EVENTS = ("zmq", "msgpack")
STRUCTURED = ("llguidance",)


def how_to_install(extra: str) -> str:
    """The commands that install an optional part of Penstock, as the end of a sentence."""
    return (
        f"run `pip install '.[{extra}]'` in a checkout of Penstock, or "
        f"`pip install './{_WHEEL}[{extra}]'` in the folder of its wheel"
    )


def not_installed(missing: Sequence[str], extra: str, needed_for: str) -> NotInstalled:
    names = listed(missing)
    verb = "is" if len(missing) == 1 else "are"
    return NotInstalled(
        f"{names} {verb} not installed, which {needed_for} needs; {how_to_install(extra)}"
    )


def require(extra: str, modules: Sequence[str], needed_for: str = "this command") -> None:
    """Raise NotInstalled if one of these modules is missing. Imports nothing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise not_installed(missing, extra, needed_for)


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
