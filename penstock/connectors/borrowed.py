"""Tiers below another engine's memory in DRAM, which takes the place of the device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from penstock.build import build_offloader, tier_codecs
from penstock.codecs.blocks import BlockValues, PartValues
from penstock.config import Config
from penstock.events import Observer
from penstock.metrics import Metrics
from penstock.metrics.endpoint import MetricsEndpoint
from penstock.node.attach import NodeOpening
from penstock.stores.base import Arena
from penstock.tiers import Tiers
from penstock.types import BlockSpec, Slot

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class BorrowedPool:
    """An `Arena` over memory that belongs to somebody else, who must keep it until we are closed.

    Only the first `block_bytes` of each slot are ever copied.
    """

    def __init__(self, memory: memoryview, *, block_bytes: int, stride_bytes: int) -> None:
        if block_bytes > stride_bytes or memory.nbytes % stride_bytes:
            raise ValueError(
                f"{memory.nbytes} bytes cannot be divided into slots of {stride_bytes} with blocks "
                f"of {block_bytes}: expected whole slots that hold a block"
            )
        self.block_bytes = block_bytes
        self.stride_bytes = stride_bytes
        self.num_slots = memory.nbytes // stride_bytes
        # No buffer is kept: vLLM closes its mapping, which fails while a buffer refers to it.
        flat = memory.cast("B")
        first = (ctypes.c_char * 1).from_buffer(flat)
        self.address = ctypes.addressof(first)
        del first
        flat.release()

    def view(self, slot: Slot) -> memoryview:
        address = self.address + slot * self.stride_bytes
        return memoryview((ctypes.c_char * self.stride_bytes).from_address(address)).cast("B")


def open_below(
    config: Config, spec: BlockSpec, pool: Arena, *, observers: Iterable[Observer], name: str
) -> Tiers:
    """Open the tiers in `config`, or attach to its node, below `pool`. Raises ConfigError.

    Blocks are bytes of unknown meaning, so codecs that must know the values do not apply.
    """
    values = BlockValues((PartValues(spec.block_bytes),))
    if config.node.url is not None:
        return NodeOpening(config).attach(spec, pool, values, observers=observers, name=name)
    codecs = tier_codecs(config, values)
    return build_offloader(config, spec, pool, codecs=codecs, observers=observers)


def serve_metrics(metrics: Metrics, port: int) -> MetricsEndpoint:
    """Serve /metrics to this machine. Raises ConfigError if the port is taken."""
    return MetricsEndpoint("127.0.0.1", port, metrics.expose, _CONTENT_TYPE, lambda: None)
