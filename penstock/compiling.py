"""numba's compiler, which keeps what it compiled by the content of our code.

numba itself keeps compiled code by the time and size of the file that the function is in. Functions
of other files are compiled into it, and packages can be built so that all files have the same time:
then it would run code of an earlier version, and read KV by an earlier format.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Whatever could be compiled into a function is in these folders.
SOURCES = [Path(__file__).parent / "codecs", Path(__file__).parent / "engine" / "attention"]


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """Like `numba.njit(**options)`. What is compiled is kept on disk where numba can write."""

    def compile_lazily(function: _Function) -> _Function:
        import numba

        try:
            made: Any = numba.njit(cache=True, **options)(function)
            _keep_by_content(made)
        except Exception as error:  # numba finds no folder to write in, or works in another way
            log.info("%s is compiled at every start: %s", function.__name__, error)
            made = numba.njit(**options)(function)
        kept: _Function = made
        return kept

    return compile_lazily


def _keep_by_content(dispatcher: Any) -> None:
    from numba.core import caching

    make: Any = caching.IndexDataCacheFile
    kept, digest = dispatcher._cache, _digest()
    if not hasattr(kept, "_cache_file"):
        raise AttributeError("this version of numba keeps what it compiled in another way")
    name = f"{kept._impl.filename_base}-{digest}"
    kept._cache_file = make(kept.cache_path, name, digest)


@cache
def _digest() -> str:
    found = hashlib.blake2b(digest_size=8)
    for folder in SOURCES:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            found.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return found.hexdigest()
