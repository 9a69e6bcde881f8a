"""What Penstock is called where packages are installed, and what to say of a part that is missing.

The import is `penstock`. The distribution is not: on PyPI that name is another project's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from penstock.errors import NotInstalled

VERSION = "0.1.0"
DISTRIBUTION = "penstock-kv"
_WHEEL = f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"

# What the embedded engine cannot be imported without. numba and gguf it asks for when needed.
ENGINE = ("torch", "transformers", "numpy", "safetensors")
SERVER = ("fastapi", "uvicorn", "pydantic")


def how_to_install(extra: str) -> str:
    """The end of a sentence: the commands that install an optional part of Penstock."""
    return (
        f"run `pip install '.[{extra}]'` in a checkout of Penstock, or "
        f"`pip install './{_WHEEL}[{extra}]'` where its wheel is"
    )


def not_installed(missing: Sequence[str], extra: str, needed_for: str) -> NotInstalled:
    names = listed(missing)
    verb = "is" if len(missing) == 1 else "are"
    return NotInstalled(
        f"{names} {verb} not installed, which {needed_for} needs; {how_to_install(extra)}"
    )


def require(extra: str, modules: Sequence[str], needed_for: str = "this command") -> None:
    """Raise NotInstalled where an optional part of Penstock is missing. Imports nothing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise not_installed(missing, extra, needed_for)


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
