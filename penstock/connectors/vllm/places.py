"""Where the files of a model or an adapter lie on this machine."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def find_files(name: str, revision: str | None, cached: str, folder: str | None) -> Path | None:
    """A path as it is, or a hub's name in its cache: the snapshot that has the file `cached`.

    `folder` is another folder that the hub's files are kept in. None if nothing is there.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, cached, cache_dir=folder, revision=revision)
    except Exception as error:  # not a hub's name at all
        log.info("%s is not in the hub's cache: %s", name, error)
        return None
    return Path(found).parent if isinstance(found, str) else None
