"""PenstockConnector as it ships, over a disk that does what the tests say.

The tests write what is wrong with the disk into a file named by FAULTS, as JSON:
    {"read_delay": seconds, "read_error": share, "write_error": share, "empty_host": number,
     "drain": seconds}
The engine's process reads it before every operation. `empty_host` drops all blocks from DRAM, once
for every new number, after having waited so long for what is under way to the disk.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

from penstock.connectors.vllm.connector import PenstockConnector as Shipped
from penstock.errors import StoreError
from penstock.stores import disk

_rng = random.Random(7)
_read, _write = disk.DiskStore.read, disk.DiskStore.write


def faults() -> dict[str, Any]:
    try:
        with open(os.environ["FAULTS"]) as file:
            return dict(json.load(file))
    except (KeyError, OSError, ValueError):
        return {}


def read(self: disk.DiskStore, blocks: Any) -> Any:
    wrong = faults()
    time.sleep(wrong.get("read_delay", 0))
    if _rng.random() < wrong.get("read_error", 0):
        return lambda: [StoreError("the disk does not answer")] * len(blocks)
    return _read(self, blocks)


def write(self: disk.DiskStore, blocks: Any, digests: Any) -> Any:
    if _rng.random() < faults().get("write_error", 0):
        digests()
        return [StoreError("the disk is full")] * len(blocks)
    return _write(self, blocks, digests)


disk.DiskStore.read = read  # type: ignore[method-assign]
disk.DiskStore.write = write  # type: ignore[method-assign]


class PenstockConnector(Shipped):
    _emptied = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        wanted = faults().get("empty_host", 0)
        if wanted != self._emptied and self._side is not None:
            self._emptied = wanted
            with self._side._lock:
                self._side._offloader.drain(faults().get("drain", 0.0))
                self._side._offloader.empty_host()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.check()
        super().shutdown()
