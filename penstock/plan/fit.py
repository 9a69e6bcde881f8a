"""What fits where: sessions on the GPUs, with DRAM, with a disk; and what a step costs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.plan.catalog import Gpu
from penstock.plan.rates import Rates
from penstock.plan.shape import ModelShape
from penstock.units import GiB

# Beside weights and KV, on each GPU: activations, captured graphs, the runtime's own.
WORKING_BYTES = 1 * GiB
# What is on its way into DRAM, and blocks that are not quite full.
DRAM_HEADROOM = 0.1


@dataclass(frozen=True, slots=True)
class Demand:
    context_tokens: int  # of one session, prompt and answers
    num_sessions: int  # open at once
    num_active: int  # of these, how many decode at once; the others wait for their users
    shared_tokens: int = 0  # the beginning that all sessions have in common
    reuse_share: float | None = None  # of prompt tokens, those computed before; None: not known
    live_bytes: int = 0  # of a trace: KV that has been seen and will be read again, at the most
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
        """The part of one of so many servers that share it."""
        return Demand(
            self.context_tokens,
            -(-self.num_sessions // num_parts),
            -(-self.num_active // num_parts),
            self.shared_tokens,
            self.reuse_share,
            self.live_bytes // num_parts,
            self.max_token_seconds,
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    gpu: Gpu
    num_gpus: int = 1  # one model over all of them: weights and KV heads are split
    memory_utilization: float = 0.9
    host_bytes: int | None = None  # DRAM for KV; None: to be sized
    disk_bytes: int = 0
    device_kv_bytes: int | None = None  # as an engine reports its pool; None: estimated

    def pool_bytes(self, weight_bytes: int) -> int:
        """For KV on all GPUs; below 0 where the weights alone do not fit."""
        if self.device_kv_bytes is not None:
            return self.device_kv_bytes
        return int(self.num_gpus * self._usable_bytes()) - weight_bytes

    def num_gpus_needed(self, num_bytes: int) -> int:
        """A power of two of them hold so much."""
        least = math.floor(num_bytes / self._usable_bytes()) + 1
        return 1 << (least - 1).bit_length()

    def _usable_bytes(self) -> float:
        return self.gpu.memory_bytes * self.memory_utilization - WORKING_BYTES


def num_copies(shape: ModelShape, num_gpus: int) -> int:
    """How often each byte of KV lies on the GPUs together; raises where heads cannot be split.

    Heads are split as far as they go; more GPUs than KV heads keep the same ones. What MLA keeps
    has no heads: every GPU has all of it.
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


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes are those of all GPUs together."""

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

    def count(self, room_bytes: float) -> int:
        """How many sessions find room, the shared beginning once."""
        return _count(room_bytes, self.shared_bytes, self.own_bytes)


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
    wanted = max(all_bytes, demand.live_bytes) * (1 + DRAM_HEADROOM)
    recommended = math.ceil(wanted / GiB) * GiB
    host_bytes = recommended if hardware.host_bytes is None else hardware.host_bytes
    both = pool_bytes + host_bytes
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
        sessions_with_disk=_count(both + hardware.disk_bytes, shared_bytes, own_bytes),
        least_host_bytes=max(0, all_bytes - pool_bytes),
        recommended_host_bytes=recommended,
    )


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One step in which all active sessions get a token."""

    resident_bytes: int
    cold_bytes: int  # read from DRAM
    device_seconds: float  # weights and resident KV, from the GPU's own memory
    cold_seconds: float  # on the link, beside the resident KV's reading
    step_seconds: float
    tokens_per_second: float  # of all that are active
    whole_tokens_per_second: float  # of as many as fit on the GPUs whole, taking turns
    # What may be read from DRAM in a step that keeps the target; None without a target.
    cold_bytes_within_target: int | None
    sessions_within_target: int | None


def decode_cost(shape: ModelShape, found: Fit, demand: Demand, rates: Rates) -> DecodeCost:
    running = found.shared_bytes + found.own_bytes * demand.num_active
    resident = min(running, max(0, found.pool_bytes))
    cold = running - resident
    weights = _weights_read(shape, found.weight_bytes, demand.num_active)
    weight_seconds = weights / rates.memory_bytes_per_second
    resident_seconds = resident / rates.memory_bytes_per_second
    cold_seconds = cold / rates.cold_bytes_per_second
    within = sessions = None
    if demand.max_token_seconds is not None:
        left = max(0.0, demand.max_token_seconds - weight_seconds)
        within = min(found.host_bytes, int(left * rates.cold_bytes_per_second))
        sessions = found.count(left * rates.memory_bytes_per_second)
        if sessions >= found.sessions_on_device:
            sessions = found.count(found.pool_bytes + within)
    step_seconds = weight_seconds + max(resident_seconds, cold_seconds)
    num_whole = min(demand.num_active, found.sessions_on_device)
    whole_bytes = found.shared_bytes + found.own_bytes * num_whole
    whole_seconds = weight_seconds + whole_bytes / rates.memory_bytes_per_second
    return DecodeCost(
        resident_bytes=resident,
        cold_bytes=cold,
        device_seconds=weight_seconds + resident_seconds,
        cold_seconds=cold_seconds,
        step_seconds=step_seconds,
        tokens_per_second=demand.num_active / step_seconds,
        whole_tokens_per_second=num_whole / whole_seconds,
        cold_bytes_within_target=within,
        sessions_within_target=sessions,
    )


def _weights_read(shape: ModelShape, weight_bytes: int, num_tokens: int) -> float:
    """Of a mixture of experts, what so many tokens pass through, at most all of it."""
    if shape.num_params is None or shape.num_active_params is None:
        return weight_bytes
    return weight_bytes * min(1.0, shape.num_active_params * num_tokens / shape.num_params)
