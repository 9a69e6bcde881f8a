"""What fits where: sessions on the GPUs, with DRAM, with a disk. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.errors import ConfigError
from penstock.shapes.catalog import Gpu
from penstock.shapes.shape import ModelShape
from penstock.units import GiB

# Beside weights and KV, on each GPU: activations, captured graphs, the runtime's own.
WORKING_BYTES = 1 * GiB
# What is on its way into DRAM, and blocks that are not quite full.
DRAM_HEADROOM = 0.1
_SPLITS = (1, 2, 4, 8, 16, 32, 64)  # GPUs that share one copy of a model
_MAX_SERVERS = 16  # up to here, leaving some of the GPUs unused is tried too


_ACTIVE_SHARE = 4


def default_active(num_sessions: int) -> int:
    """A quarter: most sessions that are open wait for somebody who reads or writes."""
    return -(-num_sessions // _ACTIVE_SHARE)


@dataclass(frozen=True, slots=True)
class Demand:
    context_tokens: int  # of one session, prompt and answers
    num_sessions: int  # open at once
    num_active: int  # of these, how many decode at once; the others wait for their users
    shared_tokens: int = 0  # the beginning that all sessions have in common
    reuse_share: float | None = None  # of prompt tokens, those computed before; None: not known
    live_bytes: int = 0  # of a trace: KV, kept once, that is read again later, at the most
    max_token_seconds: float | None = None  # the longest that a token may take

    def __post_init__(self) -> None:
        for name in ("context_tokens", "num_sessions", "num_active"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected at least 1")
        if not 0 <= self.shared_tokens < self.context_tokens:
            raise ConfigError(
                f"shared_tokens is {self.shared_tokens}: expected 0 or more, and fewer than the "
                f"context's {self.context_tokens}"
            )
        if self.num_active > self.num_sessions:
            raise ConfigError(
                f"num_active is {self.num_active}: expected no more than the {self.num_sessions} "
                "sessions"
            )

    def split(self, num_parts: int) -> Demand:
        """What the busiest of `num_parts` servers gets of it."""
        return replace(
            self,
            num_sessions=-(-self.num_sessions // num_parts),
            num_active=-(-self.num_active // num_parts),
            live_bytes=-(-self.live_bytes // num_parts),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """How GPUs are shared out: copies of the model, each with weights and a pool of its own."""

    num_servers: int
    gpus_each: int  # one model over all of them: weights and KV heads are split

    @property
    def num_gpus(self) -> int:
        return self.num_servers * self.gpus_each


@dataclass(frozen=True, slots=True)
class Hardware:
    """DRAM, disk and pool are those of all servers together."""

    gpu: Gpu
    num_gpus: int = 1
    memory_utilization: float = 0.9
    host_bytes: int | None = None  # DRAM for KV; None: to be sized
    disk_bytes: int = 0
    device_kv_bytes: int | None = None  # as engines report their pools; None: estimated
    tensor_parallel: int | None = None  # GPUs that share one copy of the model; None: chosen

    def pool_bytes(self, weight_bytes: int) -> int:
        """For KV, with one copy of the model over all GPUs; below 0 if the weights do not fit."""
        if self.device_kv_bytes is not None:
            return self.device_kv_bytes
        return int(self.num_gpus * self._usable_bytes()) - weight_bytes

    def part(self, layout: Layout) -> Hardware:
        """What one server of that layout has."""
        parts = layout.num_servers
        return replace(
            self,
            num_gpus=layout.gpus_each,
            host_bytes=None if self.host_bytes is None else self.host_bytes // parts,
            disk_bytes=self.disk_bytes // parts,
            device_kv_bytes=None if self.device_kv_bytes is None else self.device_kv_bytes // parts,
        )

    def num_gpus_needed(self, shape: ModelShape, num_bytes: int) -> int | None:
        """The fewest over which one copy can be split and that hold so much; None: too many."""
        for num_gpus in _SPLITS:
            if can_split(shape, num_gpus) and num_gpus * self._usable_bytes() > num_bytes:
                return num_gpus
        return None

    def _usable_bytes(self) -> float:
        return self.gpu.memory_bytes * self.memory_utilization - WORKING_BYTES


def num_copies(shape: ModelShape, num_gpus: int) -> int:
    """How often each byte of KV lies on the GPUs together; raises where heads cannot be split.

    Heads are split as far as they go. With more GPUs than KV heads several keep the same ones: 4
    KV heads over 8 GPUs are 2 copies. What MLA keeps has no heads: every GPU has all of it.
    """
    if shape.num_heads is not None and shape.num_heads % num_gpus:
        raise ConfigError(
            f"{shape.num_heads} attention heads cannot be split over {num_gpus} GPUs: expected a "
            "number of GPUs that divides them, such as 1, 2, 4 or 8"
        )
    if shape.is_mla:
        return num_gpus
    if shape.num_kv_heads % num_gpus and num_gpus % shape.num_kv_heads:
        raise ConfigError(
            f"{shape.num_kv_heads} KV heads cannot be split over {num_gpus} GPUs: expected a "
            "number of GPUs that divides them, or a multiple of them"
        )
    return max(1, num_gpus // shape.num_kv_heads)


def can_split(shape: ModelShape, num_gpus: int) -> bool:
    try:
        num_copies(shape, num_gpus)
    except ConfigError:
        return False
    return True


def layouts(shape: ModelShape, hardware: Hardware) -> list[Layout]:
    """Every sensible one; GPUs may be left over. Raises where the one that is asked for cannot be.

    A pool that an engine has reported belongs to the layout that engine has: all GPUs, unless
    `tensor_parallel` says otherwise.
    """
    given = hardware.tensor_parallel
    if given is None and hardware.device_kv_bytes is not None:
        given = hardware.num_gpus
    if given is not None:
        num_copies(shape, given)
        return [Layout(hardware.num_gpus // given, given)]
    found = []
    for gpus_each in _SPLITS:
        if gpus_each <= hardware.num_gpus and can_split(shape, gpus_each):
            most = hardware.num_gpus // gpus_each
            counts = range(1, most + 1) if most <= _MAX_SERVERS else (most,)
            found += [Layout(num_servers, gpus_each) for num_servers in counts]
    return found


@dataclass(frozen=True, slots=True)
class Fit:
    """Of one server, or with `times` of several: bytes are those of all GPUs together."""

    bytes_per_token: int  # a token within every window
    session_bytes: int
    own_bytes: int  # of a session, what it shares with nobody
    shared_bytes: int
    weight_bytes: int
    pool_bytes: int
    host_bytes: int  # what there is, or what is recommended
    disk_bytes: int
    sessions_on_device: int
    sessions_with_host: int
    sessions_with_disk: int
    least_host_bytes: int  # so that all sessions fit device and DRAM, no block twice
    recommended_host_bytes: int
    num_kv_copies: int = 1  # how often each byte of KV lies on a server's GPUs
    live_bytes: int = 0  # what a trace reads again, with these copies

    def times(self, num_servers: int) -> Fit:
        """All servers together. A session lies on one of them, what all share on each."""
        whole = {name: getattr(self, name) * num_servers for name in _SUMMED}
        return replace(self, **whole)

    def count(self, room_bytes: float) -> int:
        """How many sessions find room, the shared beginning once."""
        return _count(room_bytes, self.shared_bytes, self.own_bytes)


_SUMMED = (
    "shared_bytes",
    "weight_bytes",
    "pool_bytes",
    "host_bytes",
    "disk_bytes",
    "sessions_on_device",
    "sessions_with_host",
    "sessions_with_disk",
    "least_host_bytes",
    "recommended_host_bytes",
    "live_bytes",
)


def _count(room_bytes: float, shared_bytes: int, own_bytes: int) -> int:
    return max(0, int(room_bytes - shared_bytes) // own_bytes)


def fit(shape: ModelShape, weight_bytes: int, hardware: Hardware, demand: Demand) -> Fit:
    copies = num_copies(shape, hardware.num_gpus)
    session_bytes = shape.kv_bytes(demand.context_tokens) * copies
    shared_bytes = shape.full_bytes_per_token * demand.shared_tokens * copies
    own_bytes = session_bytes - shared_bytes
    pool_bytes = hardware.pool_bytes(weight_bytes)
    all_bytes = shared_bytes + own_bytes * demand.num_sessions
    # What lies on the device is in DRAM too, so that it may leave at once.
    live_bytes = demand.live_bytes * copies
    wanted = max(all_bytes, live_bytes) * (1 + DRAM_HEADROOM)
    recommended = math.ceil(wanted / GiB) * GiB
    host_bytes = recommended if hardware.host_bytes is None else hardware.host_bytes
    # Where the weights do not fit, no session runs, however much DRAM there is.
    both = pool_bytes + host_bytes if pool_bytes > 0 else 0
    everything = both + hardware.disk_bytes if pool_bytes > 0 else 0
    return Fit(
        bytes_per_token=shape.bytes_per_token * copies,
        session_bytes=session_bytes,
        own_bytes=own_bytes,
        shared_bytes=shared_bytes,
        weight_bytes=weight_bytes,
        pool_bytes=pool_bytes,
        host_bytes=host_bytes,
        disk_bytes=hardware.disk_bytes,
        sessions_on_device=_count(pool_bytes, shared_bytes, own_bytes),
        sessions_with_host=_count(both, shared_bytes, own_bytes),
        sessions_with_disk=_count(everything, shared_bytes, own_bytes),
        least_host_bytes=max(0, all_bytes - max(0, pool_bytes)),
        recommended_host_bytes=recommended,
        num_kv_copies=copies,
        live_bytes=live_bytes,
    )
