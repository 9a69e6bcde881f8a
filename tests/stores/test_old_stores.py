"""What an earlier state of the code wrote to disk and to an object store is read bit for bit.

`written_by_0.1.0.tar.gz` was written before the code moved into its present folders. The format is
a promise to stores that exist: if this test fails, either mend the code or raise the version.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from tools import Desk, cap_for, keys_of, spec

from penstock.config import RemoteConfig
from penstock.stores import folder
from penstock.stores.disk_folder import DiskFolder
from penstock.stores.remotes import open_remote

SPEC = spec(4096, "written before the move")
KEYS = keys_of(4)
SLAB_BYTES = 4 * 4096


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "written_by_0.1.0.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_an_old_folder_is_read(old: Path) -> None:
    cap_bytes = cap_for(SPEC, 4, SLAB_BYTES) + folder.FOLDER_BYTES
    store = DiskFolder(old / "folder", SPEC, cap_bytes, slab_bytes=SLAB_BYTES)
    found = {key for batch in store.scan() for _, key in batch if key is not None}
    desk = Desk(SPEC, 4)
    blocks = desk.blank(KEYS, range(4))
    assert store.get(blocks) == [None] * 4
    assert all(map(desk.right, blocks))
    assert found == set(KEYS)
    store.close()


def test_old_objects_are_read(old: Path) -> None:
    pytest.importorskip("obstore")
    store = open_remote(RemoteConfig(url=f"file://{old}/remote"), SPEC, secret=b"")
    desk = Desk(SPEC, 4)
    blocks = desk.blank(KEYS, range(4))
    assert store.exists(KEYS, 4) == [True] * 4
    assert store.get(blocks) == [None] * 4
    assert all(map(desk.right, blocks))
    store.close()
