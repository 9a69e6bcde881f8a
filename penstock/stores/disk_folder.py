"""DISK: one namespace's store in a folder that may be shared, and that may be deleted in use.

Before every batch, checks that the open files are still at their paths. If not (the folder was
deleted, renamed, replaced or unmounted), opens the store again at the same path: usually it is
empty. This is needed because the lock is lost with the folder: a second process could write there.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock

import xxhash

from penstock.errors import Foreign, Full, Missing, PenstockError, StoreError
from penstock.stores import folder, slab
from penstock.stores.base import Answers, Block, Digests, Found, Incident, Verify, WholeBlocks
from penstock.stores.directory import is_at, lock_directory, make_directory
from penstock.stores.disk import DiskStore
from penstock.stores.shared_cap import DividedFolder, SharedCap
from penstock.types import BlockKey, BlockSpec, Slot

log = logging.getLogger(__name__)


class DiskFolder(WholeBlocks):
    """A `DiskStore` in the folder `directory`, opened again if its files are deleted.

    All namespaces of the folder together stay below the cap. Thread-safe, as long as no two
    threads write the same slot.
    """

    def __init__(
        self,
        directory: Path,
        spec: BlockSpec,
        cap_bytes: int,
        *,
        read_only: bool = False,
        direct: bool = True,
        slab_bytes: int = slab.SLAB_BYTES,
        divided: DividedFolder | None = None,
    ) -> None:
        """`divided`: the folder, if other stores of this process use it too. It has its own cap."""
        self.directory = directory
        self.read_only = read_only
        self._spec = spec
        self._cap_bytes = cap_bytes
        self._direct = direct
        self._slab_bytes = slab_bytes
        self._path = folder.store_path(directory, spec.namespace)
        self._lock = Lock()
        self._incidents: deque[Incident] = (
            deque()
        )  # not locked: its reader must not wait for a disk
        self._survivors: set[BlockKey] | None = None  # until the incident is taken
        self._closed = False
        self._lock_descriptor: int | None = None
        self._divided = divided
        self._cap: SharedCap | None = None
        self._num_users: dict[
            DiskStore, int
        ] = {}  # running reads and writes, also of replaced stores
        self._num_losses = 0
        self._why_gone = ""  # why there is no open store
        self._store: DiskStore | None = self._open()
        self.num_slots = self._store.num_slots
        self._device = os.stat(directory).st_dev

    @property
    def store_directory(self) -> Path:
        """The directory of this namespace's files."""
        return self._path

    def digest(self, memory: memoryview) -> bytes:
        return xxhash.xxh3_128_digest(memory[: self._spec.block_bytes])

    def write(self, blocks: Sequence[Block], digests: Digests) -> Answers:
        with self._using(blocks) as store:
            if store is None:
                return [StoreError(self._why_gone)] * len(blocks)
            answers = store.write(blocks, digests)
            if (survivors := self._survivors) is not None:
                pairs = zip(blocks, answers, strict=True)
                survivors.update(block.key for block, answer in pairs if answer is None)
            return answers

    def read(self, blocks: Sequence[Block]) -> Verify:
        store = self._take(blocks)
        if store is None:
            gone: Answers = [Missing(self._why_gone)] * len(blocks)
            return lambda: gone
        try:
            verify = store.read(blocks)
        except BaseException:
            self._give_back(store)
            raise

        def verify_and_give_back() -> Answers:
            try:
                return verify()
            finally:
                self._give_back(store)

        return verify_and_give_back

    def drop(self, key: BlockKey, slot: Slot) -> None:
        with self._using(()) as store:
            if store is not None:
                store.drop(key, slot)

    def scan(self) -> Iterator[list[Found]]:
        with self._using(()) as store:
            if store is not None:
                yield from store.scan()
            else:
                raise StoreError(self._why_gone)

    def take_incidents(self) -> list[Incident]:
        """What has happened to the store since the last call."""
        # A write that is running now ends after this call, so its blocks are settled later.
        self._survivors = None
        return [self._incidents.popleft() for _ in range(len(self._incidents))]

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
            self._closed = True
            self._why_gone = f"{self.directory} is closed"
            if store is not None:
                if not self.read_only and (lost := self._find_lost(store, ())) is not None:
                    log.error("%s; blocks saved since then are lost", lost)
                self._retire(store)
            self._unlock()

    # The store in use, and how many threads use it.

    @contextmanager
    def _using(self, blocks: Sequence[Block]) -> Iterator[DiskStore | None]:
        store = self._take(blocks)
        try:
            yield store
        finally:
            if store is not None:
                self._give_back(store)

    def _take(self, blocks: Sequence[Block]) -> DiskStore | None:
        """The store that is at the path now. It stays open until `_give_back`."""
        with self._lock:
            self._reopen_if_lost(blocks)
            store = self._store
            if store is not None:
                self._num_users[store] = self._num_users.get(store, 0) + 1
            return store

    def _give_back(self, store: DiskStore) -> None:
        with self._lock:
            self._num_users[store] -= 1
            if self._num_users[store] == 0:
                del self._num_users[store]
                if store is not self._store:
                    store.close()

    def _retire(self, store: DiskStore) -> None:
        """Close a store that was replaced, or leave that to its last user."""
        store.files.unlock()
        if store not in self._num_users:
            store.close()

    # Noticing that the files are gone, and opening the store again.

    def _reopen_if_lost(self, blocks: Sequence[Block]) -> None:
        store = self._store
        if store is not None:
            lost = self._find_lost(store, [block.slot for block in blocks])
            if lost is None:
                return
            if self.read_only:
                if store.files.is_index_at(self._path / "index"):
                    self._open_slabs_again(store)
                    return
                # The open files are still valid, and a reader has nothing to write there.
                if not self._num_losses:
                    log.warning("%s; this process keeps reading the files it has open", lost)
                self._num_losses = 1
                return
            self._num_losses += 1
            log.error("%s; it is created again, and blocks not found there are lost", lost)
            self._reopen(store, lost)
        elif not self._closed:
            self._reopen(None, "")

    def _open_slabs_again(self, store: DiskStore) -> None:
        """Open the store again: a slab was deleted to make room and may have been created again."""
        try:
            self._store = self._open()
        except PenstockError as error:
            log.debug("%s: still reading the files that are open: %s", self.directory, error)
        else:
            self._retire(store)

    def _find_lost(self, store: DiskStore, slots: Sequence[Slot]) -> str | None:
        name = store.files.find_lost(slots)
        path = self._path
        if name is None and self._lock_descriptor is not None:
            path = self.directory
            name = None if is_at(path / "LOCK", self._lock_descriptor) else "LOCK"
        if name is None:
            return None
        if not os.path.exists(self.directory):
            return f"{self.directory} was deleted, renamed or unmounted while it was in use"
        if not os.path.exists(path):
            return f"{path} was deleted or renamed while it was in use"
        return f"{path / name} was deleted or replaced while it was in use"

    def _reopen(self, old: DiskStore | None, lost: str) -> None:
        """Open the store that is at the path now. If that fails, reads miss and writes fail."""
        self._store = None
        self._unlock()
        if old is not None:
            old.files.unlock()
        try:
            self._refuse_other_device()
            self._store = self._open()
            self._store.is_replacement = True
        except (PenstockError, OSError) as error:
            if str(error) != self._why_gone:
                log.error(
                    "%s cannot be opened again, nothing is saved to it: %s", self.directory, error
                )
            self._why_gone = str(error)
        else:
            self._why_gone = ""
            log.warning("%s is in use again", self.directory)
        is_same = old is not None and old.files.is_index_at(self._path / "index")
        if old is not None:
            if not is_same:
                self._survivors = set()
                self._incidents.append(Incident(lost, survivors=self._survivors))
            self._retire(old)

    def _refuse_other_device(self) -> None:
        """If the disk was unmounted, a new folder would fill the mount point's filesystem."""
        there = self.directory.absolute()
        while not os.path.exists(there):
            there = there.parent
        if os.stat(there).st_dev != self._device:
            raise StoreError(
                f"{self.directory} is on another filesystem than before: was it unmounted? Mount "
                "it again, or restart to use the new filesystem"
            )

    def _open(self) -> DiskStore:
        """Open the store, and create it if needed. Raises PenstockError and leaves nothing open."""
        try:
            make_directory(self.directory, self.read_only)
            if self.read_only:
                return self._open_to_read()
            if self._divided is not None:
                self._lock_descriptor, cap = self._divided.open()
            else:
                self._lock_descriptor = lock_directory(self.directory)
                cap = SharedCap(self.directory, self._cap_bytes)
            cap.use(self._path)
            self._cap = cap
            return self._open_to_write(cap)
        except OSError as error:
            self._unlock()
            raise Full(f"{self.directory} cannot be opened: {error}.") from None
        except BaseException:
            self._unlock()
            raise

    def _open_to_write(self, cap: SharedCap) -> DiskStore:
        geometry = slab.Geometry.of(self._spec, self._slab_bytes)
        if geometry.num_slots(cap.own_cap_bytes) < 1:
            raise slab.too_small(self._cap_bytes, geometry.min_cap_bytes + folder.FOLDER_BYTES)
        folder.claim(self.directory)
        if not self._path.exists():
            cap.make_room(self._path, slab.FIXED_BYTES)
        return self._open_store(cap.own_cap_bytes, partial(cap.make_room, self._path))

    def _open_to_read(self) -> DiskStore:
        shelves = folder.look_into(self.directory)
        if not shelves:
            raise Foreign(f"{self.directory} holds no store to read; check the path.")
        if not self._path.is_dir():
            wanted = folder.title(slab.Geometry.of(self._spec))
            raise Foreign(
                f"{self.directory} has no store for {wanted}; it has stores for "
                + "; ".join(f"{shelf.title}" for shelf in shelves)
                + ". Check the path, or run a server that writes there first."
            )
        return self._open_store(self._cap_bytes)

    def _open_store(
        self, cap_bytes: int, make_room: Callable[[int], None] = lambda num_bytes: None
    ) -> DiskStore:
        return DiskStore(
            self._path,
            self._spec,
            cap_bytes,
            read_only=self.read_only,
            direct=self._direct,
            slab_bytes=self._slab_bytes,
            make_room=make_room,
            incidents=self._incidents,
        )

    def _unlock(self) -> None:
        if self._cap is not None:
            self._cap.leave(self._path)
            self._cap = None
        if self._lock_descriptor is not None:
            with suppress(OSError):
                os.close(self._lock_descriptor)
            self._lock_descriptor = None
