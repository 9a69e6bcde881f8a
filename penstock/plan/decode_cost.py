"""The cost of a decode step on one server, depending on where the KV is. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.plan.fit import Demand, Fit
from penstock.shapes.gpu_rates import GpuRates
from penstock.shapes.shape import ModelShape


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One step that gives every active session a token, whether or not all fit on the GPU."""

    resident_bytes: int
    cold_bytes: int  # read from DRAM
    device_seconds: float  # reading weights and resident KV from GPU memory
    cold_seconds: float  # reading cold KV over the link, in parallel with resident KV
    step_seconds: float
    tokens_per_second: float  # of all active sessions
    whole_tokens_per_second: float  # if only whole sessions run, taking turns
    # How much a step may read from DRAM within the target; None without a target.
    cold_bytes_within_target: int | None
    sessions_within_target: int | None

    def times(self, num_servers: int, num_active: int) -> DecodeCost:
        """The cost for all servers together; the last one may have fewer sessions."""
        within, sessions = self.cold_bytes_within_target, self.sessions_within_target
        return replace(
            self,
            resident_bytes=self.resident_bytes * num_servers,
            cold_bytes=self.cold_bytes * num_servers,
            tokens_per_second=num_active / self.step_seconds,
            whole_tokens_per_second=self.whole_tokens_per_second * num_servers,
            cold_bytes_within_target=None if within is None else within * num_servers,
            sessions_within_target=None if sessions is None else sessions * num_servers,
        )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step in which a given number of sessions get a token."""

    resident_bytes: int
    cold_bytes: int
    weight_seconds: float
    resident_seconds: float
    cold_seconds: float
    seconds: float


def decode_step(shape: ModelShape, found: Fit, rates: GpuRates, num_sessions: int) -> DecodeStep:
    """Reading and computing run in parallel: the slower determines the time."""
    running = found.shared_bytes + found.own_bytes * num_sessions
    resident = min(running, max(0, found.pool_bytes))
    weights = _weights_read(shape, found.weight_bytes, num_sessions)
    weight_seconds = weights / rates.memory_bytes_per_second
    resident_seconds = resident / rates.memory_bytes_per_second
    cold_seconds = (running - resident) / rates.cold_bytes_per_second
    computing = num_sessions / rates.prefill.tokens_per_second if rates.prefill else 0.0
    reading = weight_seconds + max(resident_seconds, cold_seconds)
    return DecodeStep(
        resident,
        running - resident,
        weight_seconds,
        resident_seconds,
        cold_seconds,
        max(reading, computing) + rates.exchange_seconds,
    )


def most_within(target_seconds: float, most: int, seconds: Callable[[int], float]) -> int:
    """The most sessions, up to `most`, that a step serves in time. `seconds` must not decrease."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= target_seconds:
            low = middle
        else:
            high = middle - 1
    return low


def decode_cost(shape: ModelShape, found: Fit, demand: Demand, rates: GpuRates) -> DecodeCost:
    now = decode_step(shape, found, rates, demand.num_active)
    within = sessions = None
    target = demand.max_token_seconds
    if target is not None:
        left = max(0.0, target - now.weight_seconds - rates.exchange_seconds)
        held = int(found.host_bytes / found.host_ratio)  # of KV, which DRAM holds packed
        within = min(held, int(left * rates.cold_bytes_per_second))
        most = found.count_with(found.host_bytes)
        sessions = most_within(
            target, most, lambda num: decode_step(shape, found, rates, num).seconds
        )
    num_whole = min(demand.num_active, found.sessions_on_device)
    whole_seconds = decode_step(shape, found, rates, num_whole).seconds if num_whole else 1.0
    return DecodeCost(
        resident_bytes=now.resident_bytes,
        cold_bytes=now.cold_bytes,
        device_seconds=now.weight_seconds + now.resident_seconds,
        cold_seconds=now.cold_seconds,
        step_seconds=now.seconds,
        tokens_per_second=demand.num_active / now.seconds,
        whole_tokens_per_second=num_whole / whole_seconds,
        cold_bytes_within_target=within,
        sessions_within_target=sessions,
    )


def _weights_read(shape: ModelShape, weight_bytes: int, num_tokens: int) -> float:
    """For a mixture of experts: at most the weights that `num_tokens` tokens use."""
    if shape.num_params is None or shape.num_active_params is None:
        return weight_bytes
    return weight_bytes * min(1.0, shape.num_active_params * num_tokens / shape.num_params)
