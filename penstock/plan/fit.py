"""How many sessions fit on the GPUs, with DRAM, and with a disk. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from penstock.codecs.names import AUTO
from penstock.errors import ConfigError
from penstock.shapes.catalog import Gpu
from penstock.shapes.packing import Packing, pack_tiers
from penstock.shapes.shape import ModelShape, suggest_block_tokens
from penstock.types import Tier
from penstock.units import GiB

# Per GPU, beyond weights and KV: activations, captured graphs, the CUDA runtime.
WORKING_BYTES = 1 * GiB
# For transfers in flight and partly filled blocks.
DRAM_HEADROOM = 0.1
_SPLITS = (1, 2, 4, 8, 16, 32, 64)  # GPUs that share one copy of a model
_MAX_SERVERS = 16  # up to this many, layouts that leave GPUs unused are tried too


def default_active(num_sessions: int) -> int:
    """A quarter: most open sessions wait for a user to read or type."""
    return -(-num_sessions // 4)


@dataclass(frozen=True, slots=True)
class Demand:
    context_tokens: int  # per session, prompts and answers
    num_sessions: int  # open at once
    num_active: int  # how many of them decode at once; the rest wait for their users
    shared_tokens: int = 0  # length of the prefix that all sessions share
    num_turns: int = 1  # per session, each with a checkpoint of windows and states in DRAM
    reuse_share: float | None = None  # share of prompt tokens computed before; None: unknown
    live_bytes: int = 0  # peak of the KV that a trace reads again later, each block once
    max_token_seconds: float | None = None  # maximum time per token

    def __post_init__(self) -> None:
        for name in ("context_tokens", "num_sessions", "num_active", "num_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected at least 1")
        if not 0 <= self.shared_tokens < self.context_tokens:
            raise ConfigError(
                f"shared_tokens is {self.shared_tokens}: expected 0 or more, and less than "
                f"context_tokens, {self.context_tokens}"
            )
        if self.num_active > self.num_sessions:
            raise ConfigError(
                f"num_active is {self.num_active}: expected at most num_sessions, "
                f"{self.num_sessions}"
            )

    def split(self, num_parts: int) -> Demand:
        """The share of the busiest of `num_parts` servers."""
        return replace(
            self,
            num_sessions=-(-self.num_sessions // num_parts),
            num_active=-(-self.num_active // num_parts),
            live_bytes=-(-self.live_bytes // num_parts),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """How the GPUs are divided: copies of the model, each with its own weights and KV pool."""

    num_servers: int
    gpus_each: int  # GPUs per copy; its weights and KV heads are split over them

    @property
    def num_gpus(self) -> int:
        return self.num_servers * self.gpus_each


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware to plan for. DRAM, disk and KV pool are totals over all servers."""

    gpu: Gpu
    num_gpus: int = 1
    memory_utilization: float = 0.9
    host_bytes: int | None = None  # DRAM for KV; None: the plan sizes it
    disk_bytes: int = 0
    device_kv_bytes: int | None = None  # KV pool as reported by an engine; None: estimated
    tensor_parallel: int | None = None  # GPUs per copy of the model; None: the plan chooses
    host_codec: str = AUTO
    disk_codec: str = AUTO
    remote_codec: str = AUTO

    @property
    def codecs(self) -> dict[Tier, str]:
        """As asked for; see `packings` for what that means for a model."""
        return {
            Tier.HOST: self.host_codec,
            Tier.DISK: self.disk_codec,
            Tier.REMOTE: self.remote_codec,
        }

    def pool_bytes(self, weight_bytes: int) -> int:
        """Room for KV with one copy of the model on all GPUs; negative if it does not fit."""
        if self.device_kv_bytes is not None:
            return self.device_kv_bytes
        return int(self.num_gpus * self._usable_bytes()) - weight_bytes

    def part(self, layout: Layout) -> Hardware:
        """The hardware of one server in that layout."""
        parts = layout.num_servers
        return replace(
            self,
            num_gpus=layout.gpus_each,
            host_bytes=None if self.host_bytes is None else self.host_bytes // parts,
            disk_bytes=self.disk_bytes // parts,
            device_kv_bytes=None if self.device_kv_bytes is None else self.device_kv_bytes // parts,
        )

    def num_gpus_needed(self, shape: ModelShape, num_bytes: int) -> int | None:
        """The fewest GPUs that can share one copy and hold `num_bytes`; None if too many."""
        for num_gpus in _SPLITS:
            if can_split(shape, num_gpus) and num_gpus * self._usable_bytes() > num_bytes:
                return num_gpus
        return None

    def _usable_bytes(self) -> float:
        return self.gpu.memory_bytes * self.memory_utilization - WORKING_BYTES


def num_copies(shape: ModelShape, num_gpus: int) -> int:
    """How many GPUs hold each byte of KV, at most. Raises if the heads cannot be split.

    With more GPUs than KV heads, several GPUs hold the same heads. MLA has no KV heads to split, so
    every GPU holds everything. States are always split: see `LayerGroup.num_copies`.
    """
    if shape.num_heads is not None and shape.num_heads % num_gpus:
        raise ConfigError(
            f"{shape.num_heads} attention heads cannot be split over {num_gpus} GPUs: expected a "
            "number of GPUs that divides them, such as 1, 2, 4 or 8"
        )
    return max(group.num_copies(num_gpus) for group in shape.groups)


def can_split(shape: ModelShape, num_gpus: int) -> bool:
    try:
        num_copies(shape, num_gpus)
    except ConfigError:
        return False
    return True


def packings(shape: ModelShape, hardware: Hardware, num_gpus: int) -> dict[Tier, Packing]:
    """How the tiers of one server of `num_gpus` pack KV. Raises if a codec does not apply."""
    return pack_tiers(
        shape,
        hardware.codecs,
        suggest_block_tokens(shape.bytes_per_token),
        num_gpus=num_gpus,
        setting="--{tier}-codec",
    )


def layouts(shape: ModelShape, hardware: Hardware) -> list[Layout]:
    """Every sensible layout; GPUs may stay unused. Raises if the requested one is impossible.

    A reported KV pool belongs to the layout of the engine that reported it: one copy on all GPUs,
    unless `tensor_parallel` is given.
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
    """What fits on one server, or on several (`times`). Bytes are totals over its GPUs.

    On the GPUs a session is all its tokens, its windows and its states. In DRAM it is the tokens of
    layers that keep all, and a checkpoint of windows and states for each turn, packed by DRAM's
    codec.
    """

    bytes_per_token: int  # of a token that every layer keeps
    session_bytes: int  # on the GPUs
    own_bytes: int  # the part of a session that is not shared
    shared_bytes: int
    weight_bytes: int
    pool_bytes: int
    host_bytes: int  # as given, or as recommended
    disk_bytes: int
    sessions_on_device: int
    sessions_with_host: int
    sessions_with_disk: int
    least_host_bytes: int  # so that all sessions fit if no block is in both device and DRAM
    recommended_host_bytes: int
    num_kv_copies: int = 1  # how many of a server's GPUs hold each byte of KV
    live_bytes: int = 0  # KV that a trace reads again, including copies; not packed
    offloaded_bytes: int = 0  # of a session, in DRAM
    offloaded_own_bytes: int = 0  # the part of it that is not shared
    checkpoint_bytes: int = 0  # of windows and states, in DRAM; 0 if all layers keep all tokens
    host_ratio: float = 1.0  # bytes in DRAM for each byte of KV, with its codec
    disk_ratio: float = 1.0
    host_blocks: int = 0  # that `host_bytes` and `disk_bytes` hold, of layers that keep all tokens
    disk_blocks: int = 0
    block_tokens: int = 0

    @property
    def host_tokens(self) -> int:
        return self.host_blocks * self.block_tokens

    @property
    def disk_tokens(self) -> int:
        return self.disk_blocks * self.block_tokens

    def times(self, num_servers: int) -> Fit:
        """All servers together. Each session is on one server, the shared prefix on every one."""
        whole = {name: getattr(self, name) * num_servers for name in _SUMMED}
        return replace(self, **whole)

    def count(self, room_bytes: float) -> int:
        """How many sessions fit on GPUs, counting the shared prefix once."""
        return _count(room_bytes, self.shared_bytes, self.own_bytes)

    def count_with(self, lower_bytes: float) -> int:
        """How many sessions fit on the GPUs and in `lower_bytes` of lower tiers together."""
        return _count_with(
            *(max(0, self.pool_bytes), lower_bytes, self.shared_bytes),
            *(self.own_bytes, self.offloaded_own_bytes),
        )


_SUMMED = (
    *("shared_bytes", "weight_bytes", "pool_bytes", "host_bytes", "disk_bytes", "live_bytes"),
    *("sessions_on_device", "sessions_with_host", "sessions_with_disk"),
    *("least_host_bytes", "recommended_host_bytes", "host_blocks", "disk_blocks"),
)


def _count(room_bytes: float, shared_bytes: int, own_bytes: int) -> int:
    return max(0, int(room_bytes - shared_bytes) // own_bytes)


def _count_with(
    pool_bytes: int, lower_bytes: float, shared_bytes: int, own_bytes: int, lower_own_bytes: int
) -> int:
    """A session may lie partly on the device and partly below it, where it has another size."""
    on_device = Fraction(pool_bytes - shared_bytes, own_bytes)
    return max(0, math.floor(on_device + Fraction(int(lower_bytes), lower_own_bytes)))


def fit(shape: ModelShape, weight_bytes: int, hardware: Hardware, demand: Demand) -> Fit:
    num_gpus, context, shared = hardware.num_gpus, demand.context_tokens, demand.shared_tokens
    copies = num_copies(shape, num_gpus)
    session_bytes = shape.kv_bytes(context, num_gpus=num_gpus)
    shared_bytes = shape.growing_bytes(shared, num_gpus=num_gpus)
    own_bytes = session_bytes - shared_bytes
    block_tokens = suggest_block_tokens(shape.bytes_per_token)
    packed = packings(shape, hardware, num_gpus)
    raw_block_bytes = shape.offloaded_bytes(block_tokens, 0, num_gpus=num_gpus)
    if not raw_block_bytes:  # no layer keeps all tokens
        raw_block_bytes = max(1, shape.offloaded_bytes(block_tokens, num_gpus=num_gpus))
    slots = {tier: packing.slot_bytes(raw_block_bytes) for tier, packing in packed.items()}
    ratios = {tier: packing.ratio for tier, packing in packed.items()}
    host_ratio, disk_ratio = ratios[Tier.HOST], ratios[Tier.DISK]

    def in_dram(num_tokens: int, num_turns: int = 1) -> int:
        raw_bytes = shape.offloaded_bytes(num_tokens, num_turns, num_gpus=num_gpus)
        return packed[Tier.HOST].packed_bytes(raw_bytes)

    # The shared prefix has a checkpoint of its own, so that new sessions can continue it.
    offloaded = in_dram(context, demand.num_turns)
    offloaded_shared = in_dram(shared)
    offloaded_own = max(1, offloaded - in_dram(shared, 0))
    pool_bytes = hardware.pool_bytes(weight_bytes)
    all_bytes = offloaded_shared + offloaded_own * demand.num_sessions
    # Counts KV on the device too: a copy in DRAM lets it leave the device at once.
    live_bytes = demand.live_bytes * (1 if shape.is_mla else copies)
    wanted = max(all_bytes, packed[Tier.HOST].packed_bytes(live_bytes)) * (1 + DRAM_HEADROOM)
    recommended = math.ceil(wanted / GiB) * GiB
    host_bytes = recommended if hardware.host_bytes is None else hardware.host_bytes
    sessions_on_device = _count(pool_bytes, shared_bytes, own_bytes)

    def count_with(lower_bytes: int) -> int:
        # If the weights do not fit, no session runs, however much DRAM there is.
        if pool_bytes <= 0:
            return 0
        return _count_with(pool_bytes, lower_bytes, shared_bytes, own_bytes, offloaded_own)

    on_device = Fraction(max(0, pool_bytes) - shared_bytes, own_bytes)
    least_host_bytes = math.ceil((demand.num_sessions - on_device) * offloaded_own)
    disk_in_dram = int(hardware.disk_bytes * host_ratio / disk_ratio)  # what would hold as much
    return Fit(
        bytes_per_token=sum(
            group.token_bytes(shape.bits) * group.num_copies(num_gpus) for group in shape.groups
        ),
        session_bytes=session_bytes,
        own_bytes=own_bytes,
        shared_bytes=shared_bytes,
        weight_bytes=weight_bytes,
        pool_bytes=pool_bytes,
        host_bytes=host_bytes,
        disk_bytes=hardware.disk_bytes,
        sessions_on_device=sessions_on_device,
        sessions_with_host=count_with(host_bytes),
        sessions_with_disk=count_with(host_bytes + disk_in_dram),
        least_host_bytes=max(0, least_host_bytes),
        recommended_host_bytes=recommended,
        num_kv_copies=copies,
        live_bytes=live_bytes,
        offloaded_bytes=offloaded,
        offloaded_own_bytes=offloaded_own,
        checkpoint_bytes=packed[Tier.HOST].packed_bytes(
            shape.checkpoint_bytes(context, num_gpus=num_gpus)
        ),
        host_ratio=host_ratio,
        disk_ratio=disk_ratio,
        host_blocks=host_bytes // slots[Tier.HOST],
        disk_blocks=hardware.disk_bytes // slots[Tier.DISK],
        block_tokens=block_tokens,
    )
