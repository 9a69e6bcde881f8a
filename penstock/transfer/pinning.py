"""Pins DRAM for a GPU, in the background because 16 GiB take several seconds."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.stores.host import HostArena
from penstock.types import Slot
from penstock.units import GiB, format_bytes

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # has no type annotations

_STEP_BYTES = GiB // 2
_LOG_SECONDS = 10.0
_MAPPED = 2  # cudaHostRegisterMapped: kernels may read it too


class PinnedSlots:
    """Pins an arena from the first slot up. The GPU can use only slots that are pinned."""

    def __init__(self, arena: HostArena, gpu: Any) -> None:
        self._arena = arena
        self._gpu = gpu
        self.error: Exception | None = None
        self._pinned: list[int] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="penstock-pin", daemon=True)
        arena.num_for_device = 0

    @property
    def num_slots(self) -> int:
        """Number of slots that are pinned, from the first on."""
        return self._arena.num_for_device

    def start(self) -> None:
        """Pin the first part now and the rest in the background.

        Raises ConfigError if the first part cannot be pinned.
        """
        self._pin_some()
        self._thread.start()

    def start_in_background(self) -> None:
        """Pin everything in the background. A failure sets `error`."""
        self._thread.start()

    def has(self, slots: Sequence[Slot]) -> bool:
        return max(slots) < self.num_slots

    def wait_for(self, slots: Sequence[Slot]) -> None:
        """Wait until all these slots are pinned. Raises the error if that fails."""
        last = max(slots)
        with self._changed:
            self._changed.wait_for(
                lambda: last < self.num_slots or self.error is not None or self._stopped
            )
        if last >= self.num_slots:
            raise self.error or ConfigError("DRAM is not pinned because the tiers are closing")

    def close(self) -> None:
        self._stopped = True
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        for address in self._pinned:
            _cuda.cudart().cudaHostUnregister(address)

    def _run(self) -> None:
        arena, started = self._arena, time.monotonic()
        logged = started
        try:
            _cuda.set_device(self._gpu)
            while self.num_slots < arena.num_slots and not self._stopped:
                self._pin_some()
                if time.monotonic() - logged > _LOG_SECONDS:
                    logged = time.monotonic()
                    done = format_bytes(self.num_slots * arena.stride_bytes)
                    log.info("pinned %s of %s of DRAM", done, format_bytes(arena.num_bytes))
        except Exception as error:
            log.exception("DRAM could not be pinned; only the part pinned so far is used")
            self.error = error
            with self._changed:
                self._changed.notify_all()
            return
        size, seconds = format_bytes(arena.num_bytes), time.monotonic() - started
        log.info("pinned %s of DRAM in %.1f s", size, seconds)

    def _pin_some(self) -> None:
        """Pin the next slots. A block must be within one pinned range."""
        arena = self._arena
        count = max(1, _STEP_BYTES // arena.stride_bytes)
        count = min(count, arena.num_slots - self.num_slots)
        address = arena.address + self.num_slots * arena.stride_bytes
        num_bytes = count * arena.stride_bytes
        arena.make_huge(self.num_slots, count)
        error = int(_cuda.cudart().cudaHostRegister(address, num_bytes, _MAPPED))
        if error != 0:
            raise ConfigError(
                f"{format_bytes(num_bytes)} of DRAM cannot be pinned for the GPU (CUDA error "
                f"{error}, {format_bytes(self.num_slots * arena.stride_bytes)} are pinned "
                "already); lower host.size, or raise the limit on locked memory (ulimit -l)."
            )
        self._pinned.append(address)
        with self._changed:
            arena.num_for_device += count
            self._changed.notify_all()


def has_same_addresses(arena: HostArena) -> bool:
    """Whether kernels can read pinned DRAM at the addresses it has in this process."""
    found = ctypes.c_uint64()
    error = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(
        ctypes.byref(found), ctypes.c_void_p(arena.address), ctypes.c_uint(0)
    )
    return bool(error == 0 and found.value == arena.address)
