"""The command-line options of every command that opens the engine.

Typer reads the signature of a command. `with_engine` extends it with an option for each field of
`EngineOptions`, and passes their values to the command as one `engine` parameter.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from penstock.commands.config import (
    OPTIONS_TYPED,
    file_option,
    options_as_typed,
    parse_settings,
    set_option,
)
from penstock.config import Config
from penstock.config.options import EngineOptions, Option, tiers_config

# The options of each help panel, in the order of --help.
_PANELS: dict[str, tuple[str, ...]] = {
    "KV tiers": (
        *("kv_offloading_size", "disk_path", "disk_size", "remote", "node", "audit_share"),
        *("config", "set"),
    ),
    "Engine": (
        *("device_kv_gib", "gpu_memory_utilization", "dtype", "kv_cache_dtype", "device"),
        *("block_tokens", "max_num_batched_tokens", "max_num_seqs", "max_model_len"),
        *("max_waiting", "launch_ahead", "load_in_step", "segment_separator"),
    ),
    "KV placement": (
        *("cold_kv", "cold_attention", "resident_prefix_tokens", "resident_tail_tokens"),
        "session_device_tokens",
        *("device_high_watermark", "device_low_watermark", "max_cold_gib_per_step"),
        "turn_seconds",
    ),
    "KV events": ("kv_events", "kv_events_topic", "kv_events_replay"),
}
_NAMES = [name for names in _PANELS.values() for name in names]


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The values of these options."""

    given: dict[str, Any] = field(repr=False)  # fields of `EngineOptions`
    config: Path | None
    set: list[str] | None = field(repr=False)

    def options(self, model: str) -> EngineOptions:
        return EngineOptions(model, **self.given)

    def tiers(self, model: str) -> Config | None:
        """Return the settings of the tiers, checked on this machine; None if offloading is off.

        Later sources win: the file, the environment, the options, --set.
        """
        settings = parse_settings(self.set or ())
        config = tiers_config(self.options(model), self.config, settings, OPTIONS_TYPED)
        if config is not None:
            from penstock.stores.preflight import check_tiers

            check_tiers(config)
        return config


def cli_option(cls: Any, name: str, panel: str | None = None, *, is_bounded: bool = True) -> Any:
    """Return the Typer option for a field of a dataclass, described by its `Option`."""
    described = next(each for each in fields(cls) if each.name == name)
    found: Option = described.metadata["option"]
    # A flag that is off by default does not need a --no-... variant.
    flags = [f"--{name.replace('_', '-')}"] if described.default is False else []
    return typer.Option(
        *flags,
        min=found.low if is_bounded else None,
        max=found.high if is_bounded else None,
        metavar=found.metavar,
        help=found.help,
        rich_help_panel=panel,
    )


Model = Annotated[str, cli_option(EngineOptions, "model")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=cli_option(EngineOptions, "model").help)
]


def with_engine(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `engine` with the options above."""

    @wraps(command)
    def run(**given: Any) -> None:
        # Idle OpenMP threads that spin take CPU time from other threads. Torch reads this when it
        # loads.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        values = {name: given.pop(name) for name in _NAMES}
        engine = EngineArguments(config=values.pop("config"), set=values.pop("set"), given=values)
        with options_as_typed(_NAMES):
            command(**given, engine=engine)

    own = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own.parameters.values()
        if parameter.name != "engine"
    ]
    parameters += _engine_parameters()
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _engine_parameters() -> list[inspect.Parameter]:
    kinds = get_type_hints(EngineOptions)
    annotations: dict[str, Any] = {
        "config": Annotated[Path | None, file_option("KV tiers")],
        "set": Annotated[list[str] | None, set_option("KV tiers")],
    }
    for panel, names in _PANELS.items():
        for name in kinds.keys() & names:
            annotations[name] = Annotated[kinds[name], cli_option(EngineOptions, name, panel)]
    defaults = {each.name: each.default for each in fields(EngineOptions)}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=annotations[name],
        )
        for name in _NAMES
    ]
