"""The options of every command that opens the engine, in one place.

Typer reads a command's signature. `with_engine` writes one: the fields of `EngineArguments` stand
in it as options, and the command is called with them as one `engine`.
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

from penstock.commands.config import OPTIONS_TYPED, options_as_typed, parse_settings
from penstock.config import Config
from penstock.config.options import EngineOptions, tiers_config

_PANEL = "Engine"
_TIERS_PANEL = "KV tiers"
_RESIDENCY_PANEL = "Where KV in use lies"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A folder, a .gguf file, a name on the Hugging Face hub, or smollm2-135m.",
    ),
]


@dataclass(frozen=True, slots=True)
class EngineArguments:
    kv_offloading_size: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GiB",
            help="DRAM for KV; 0 offloads nothing. By default host.size of the settings.",
            rich_help_panel=_TIERS_PANEL,
        ),
    ] = None
    disk_path: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A folder for KV that survives a restart.",
            rich_help_panel=_TIERS_PANEL,
        ),
    ] = None
    disk_size: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="GiB", help="The most that folder takes.", rich_help_panel=_TIERS_PANEL
        ),
    ] = None
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A store that instances share: redis://host, s3://bucket/prefix, mooncake://host.",
            rich_help_panel=_TIERS_PANEL,
        ),
    ] = field(default=None, repr=False)
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML file of settings; else the one PENSTOCK_CONFIG names.",
            rich_help_panel=_TIERS_PANEL,
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A setting that overrules all others; may be repeated.",
            rich_help_panel=_TIERS_PANEL,
        ),
    ] = field(default=None, repr=False)
    device_kv_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GiB",
            help="KV on the device. By default 1 on a CPU, and on a GPU what is left.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            min=0.01, max=1, metavar="SHARE", help="Of a GPU's memory.", rich_help_panel=_PANEL
        ),
    ] = 0.9
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="auto, bfloat16, float16 or float32.",
            rich_help_panel=_PANEL,
        ),
    ] = "auto"
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="auto, cpu or cuda.", rich_help_panel=_PANEL),
    ] = "auto"
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of a block. By default so many that it has 1 to 2 MiB.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Tokens of one step.", rich_help_panel=_PANEL),
    ] = 512
    max_num_seqs: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Sequences that run at once.", rich_help_panel=_PANEL
        ),
    ] = 64
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="The longest context, of prompt and answer together. By default the model's own.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    max_waiting: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Sequences that may wait; more are refused.",
            rich_help_panel=_PANEL,
        ),
    ] = 256

    cold_kv: Annotated[
        bool,
        typer.Option(
            help="Part of a running sequence's KV may lie in DRAM and be read there.",
            rich_help_panel=_RESIDENCY_PANEL,
        ),
    ] = True
    resident_prefix_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="The first tokens of every sequence stay on the device as long as they can.",
            rich_help_panel=_RESIDENCY_PANEL,
        ),
    ] = 1024
    resident_tail_tokens: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="And the last ones.", rich_help_panel=_RESIDENCY_PANEL
        ),
    ] = 512
    session_device_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="What one sequence keeps on the device when others need room.",
            rich_help_panel=_RESIDENCY_PANEL,
        ),
    ] = None
    device_high_watermark: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            metavar="SHARE",
            help="Of the pool in use: from here on KV leaves it.",
            rich_help_panel=_RESIDENCY_PANEL,
        ),
    ] = 0.98
    device_low_watermark: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            metavar="SHARE",
            help="Below this it comes back.",
            rich_help_panel=_RESIDENCY_PANEL,
        ),
    ] = 0.95
    max_cold_gib_per_step: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GiB",
            help="Read from DRAM in one step. By default 0.25 on a GPU; a CPU needs no bound.",
            rich_help_panel=_RESIDENCY_PANEL,
        ),
    ] = None
    turn_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="Sequences take turns of this length while others wait for room; their KV stays "
            "in DRAM meanwhile. By default each stays until it has ended.",
            rich_help_panel=_RESIDENCY_PANEL,
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """As `EngineOptions` names them."""
        outside = ("config", "set")
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in outside
        }

    def options(self, model: str) -> EngineOptions:
        return EngineOptions(model, **self.given())

    def tiers(self, model: str) -> Config | None:
        """The tiers that are asked for, checked against this machine; None: nothing is offloaded.

        Later sources win: the file, the environment, the options, --set.
        """
        settings = parse_settings(self.set or ())
        config = tiers_config(self.options(model), self.config, settings, OPTIONS_TYPED)
        if config is not None:
            from penstock.stores.preflight import check_tiers

            check_tiers(config)
        return config


def with_engine(command: Callable[..., None]) -> Callable[..., None]:
    """A command with a parameter `engine`, as one with an option for each of its fields."""
    hints = get_type_hints(EngineArguments, include_extras=True)
    names = [field.name for field in fields(EngineArguments)]

    @wraps(command)
    def run(**given: Any) -> None:
        # Idle threads that spin take the processor from others; torch reads this when it loads.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        engine = EngineArguments(**{name: given.pop(name) for name in names})
        with options_as_typed(names):
            command(**given, engine=engine)

    own = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own.parameters.values()
        if parameter.name != "engine"
    ]
    parameters += [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(EngineArguments)
    ]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
