"""Finds the files of a model or an adapter on this machine."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def find_files(name: str, revision: str | None, cached: str, folder: str | None) -> Path | None:
    """The path `name`, or the snapshot in the hub's cache that has the file `cached`.

    `folder` replaces the hub's default cache folder. None if there are no files.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, cached, cache_dir=folder, revision=revision)
    except Exception as error:  # `name` is not a valid name in the hub
        log.info("%s is not in the hub's cache: %s", name, error)
        return None
    return Path(found).parent if isinstance(found, str) else None
