"""PenstockConnector as it ships, over a disk that does what the tests say.

The tests write what is wrong into a file named by FAULTS, as JSON:
    {"read_delay": seconds, "read_error": share, "read_error_at": place, "write_error": share,
     "empty_host": number, "drain": seconds,
     "error": {"at": "SchedulerSide.lookup", "call": 1, "after": false}, "round": number}
All of vLLM's processes read it before every operation. `read_error_at` fails one block of every
read: 0 is the first one, 0.5 the one in the middle, 1 the last one. `empty_host` drops all blocks
from DRAM, once for every new number, after having waited so long for what is under way to the disk.
`error` raises once in a round, at the given call of a method, before or after it has done its work;
with every new round both sides of the connector are made anew.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from penstock.connectors.vllm.connector import PenstockConnector as Shipped
from penstock.connectors.vllm.connector import PenstockMetadata
from penstock.connectors.vllm.scheduler import SchedulerSide
from penstock.connectors.vllm.worker import WorkerSide
from penstock.connectors.vllm.worker_guard import GuardedWorker
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
    verify = _read(self, blocks)
    place = wrong.get("read_error_at")
    if place is None or not blocks:
        return verify

    def all_but_one() -> Any:
        answers = list(verify())
        answers[round(place * (len(blocks) - 1))] = StoreError("the disk does not answer")
        return answers

    return all_but_one


def write(self: disk.DiskStore, blocks: Any, digests: Any) -> Any:
    if _rng.random() < faults().get("write_error", 0):
        digests()
        return [StoreError("the disk is full")] * len(blocks)
    return _write(self, blocks, digests)


disk.DiskStore.read = read  # type: ignore[method-assign]
disk.DiskStore.write = write  # type: ignore[method-assign]


_num_calls: dict[tuple[int, str], int] = {}


def _breakable(owner: type, name: str) -> None:
    real = getattr(owner, name)
    place = f"{owner.__name__}.{name}"

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrong = faults()
        error = wrong.get("error") or {}
        if error.get("at") != place:
            return real(self, *args, **kwargs)
        call = wrong["round"], place
        _num_calls[call] = _num_calls.get(call, 0) + 1
        is_it = _num_calls[call] == error["call"]
        if is_it:
            Path(os.environ["FAULTS"] + ".injected").write_text(str(wrong["round"]))
        if is_it and not error["after"]:
            raise RuntimeError(f"injected before {place}")
        result = real(self, *args, **kwargs)
        if is_it:
            raise RuntimeError(f"injected after {place}")
        return result

    setattr(owner, name, run)


for _name in ("lookup", "allocated", "orders", "report", "finished", "sources"):
    _breakable(SchedulerSide, _name)
for _name in ("begin", "load", "save", "poll"):
    _breakable(WorkerSide, _name)


class PenstockConnector(Shipped):
    _emptied = 0
    _round = 0
    _shards: Any = None

    def _open(self, shards: Any) -> None:
        self._shards = shards
        super()._open(shards)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if self._is_new_round():
            assert self._scheduler is not None
            (self._scheduler.side or self._scheduler._abandoned).close()
            super()._open(self._shards)
        wanted = faults().get("empty_host", 0)
        side = None if self._scheduler is None else self._scheduler.side
        if wanted != self._emptied and side is not None:
            self._emptied = wanted
            with side._lock:
                side._offloader.drain(faults().get("drain", 0.0))
                side._offloader.empty_host()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def handle_preemptions(self, kv_connector_metadata: PenstockMetadata) -> None:
        if self._is_new_round():
            assert self._worker is not None
            self._worker.close()
            self._worker = GuardedWorker(lambda arena: self._device.open(arena, 2))
        super().handle_preemptions(kv_connector_metadata)

    def _is_new_round(self) -> bool:
        before, self._round = self._round, faults().get("round", 0)
        return before != self._round

    def shutdown(self) -> None:
        if self._scheduler is not None and self._scheduler.side is not None:
            self._scheduler.side.check()
        super().shutdown()
