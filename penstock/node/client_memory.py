"""ClientMemory: a node's DRAM and seals in a client's process.

The memory of a node that is gone stays, so that pinned blocks can be read, until that of another
node takes its place at the same addresses.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial

from penstock.errors import ConfigError
from penstock.node.connection import Place
from penstock.node.wire import WireError
from penstock.stores.host import HostArena
from penstock.transfer.seals import ReadSeals
from penstock.types import KEY_BYTES, BlockSpec

Remap = Callable[[Callable[[], None]], None]
"""Calls its argument, which replaces the memory: copies unpin the old before and pin the new."""


class ClientMemory:
    def __init__(self, place: Place, spec: BlockSpec, remap: Remap) -> None:
        """`spec` is that of the blocks in DRAM. Raises ConfigError or OSError.

        The caller closes the files of `place` then.
        """
        if place.block_bytes != spec.block_bytes:
            raise ConfigError(
                f"the node has blocks of {place.block_bytes} bytes for this model, this process "
                f"needs {spec.block_bytes}: expected the same codec; upgrade the older one."
            )
        self.place = place
        headroom = place.stride_bytes - spec.stride_bytes
        self.host = HostArena.over(place.file, spec, place.dram_bytes, headroom)
        self._seals_memory = _map_seals(place)
        self.seals = ReadSeals(self.host, memoryview(self._seals_memory))
        self._remap = remap

    def replace(self, place: Place) -> None:
        """Use another node's memory. Raises PenstockError or OSError.

        `place` says whether it is used in spite of an error.
        """
        try:
            if place.shape != self.place.shape:
                raise WireError("its DRAM has another size; restart this process to use it")
            self._remap(partial(self._use, place))
        finally:
            if self.place is not place:
                close_files(place)

    def close_files(self) -> None:
        """Nothing will be replaced any more."""
        close_files(self.place)

    def _use(self, place: Place) -> None:
        self.host.replace_memory(place.file)
        self._seals_memory = _map_seals(place)
        self.seals.replace_memory(memoryview(self._seals_memory))
        close_files(self.place)
        self.place = place


def _map_seals(place: Place) -> mmap.mmap:
    num_bytes = place.num_slots * KEY_BYTES
    return mmap.mmap(place.seals_file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def close_files(place: Place) -> None:
    os.close(place.file)
    os.close(place.seals_file)
