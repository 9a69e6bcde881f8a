"""Loads a model and starts its engine, and reports the slow steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config, describe
from penstock.config.options import EngineOptions
from penstock.errors import ConfigError
from penstock.events import Event, Observer, Recovered
from penstock.install import VERSION
from penstock.server.backend import Serving
from penstock.server.prompts import Prompts
from penstock.server.record import Recorder
from penstock.server.schema import MAX_CHOICES
from penstock.units import counted

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.server.tracing import Tracer  # wants an extra

log = logging.getLogger("penstock.server")

_STEPS = 10  # of a long recovery
_OF_TIERS = (
    "model",
    "kv_offloading_backend",
    "node",
    "kv_offloading_size",
    "disk_path",
    "disk_size",
    "remote",
)


def load_serving(
    options: EngineOptions,
    tiers: Config | None,
    *,
    observers: tuple[Observer, ...],
    names: tuple[str, ...],
    tell: Callable[[str], None],
    recorder: Recorder | None = None,
    tracer: Tracer | None = None,
    chat_template: str | None = None,
    mending: Mapping[str, object] | None = None,
    tool_call_parser: str | None = None,
) -> Serving:
    """Open the engine and start it.

    Raises a PenstockError if that fails; then nothing stays open.
    """
    # Imported here: torch takes seconds, and the server already answers.
    tell("starting the engine")
    from penstock.engine.open import open_engine
    from penstock.engine.service import Service

    observers = (*observers, RecoveryTeller(tell))
    if recorder is not None:
        observers = (*observers, recorder)
    if tracer is not None:
        observers = (*observers, tracer)
    try:
        engine = open_engine(options, tiers, observers=observers, progress=tell)
    except (MemoryError, RuntimeError) as error:  # from torch, if memory runs out
        log.debug("the engine could not be started", exc_info=True)
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(
            f"the engine cannot be started ({reason}); lower --device-kv-gib or "
            "--kv-offloading-size, or choose a smaller model."
        ) from error
    try:
        prompts = Prompts(
            engine.loaded.tokenizer,
            engine.loaded.max_tokens,
            chat_template,
            options.segment_separator,
            tool_call_parser,
        )
        names = names or (default_name(options.model),)
        if recorder is not None:
            recorder.begin(engine.block_tokens, names[0], _settings(engine, options))
        if tracer is not None:
            tracer.begin(names[0])
    except BaseException:
        engine.close()
        raise
    return Serving(
        Service(engine),
        prompts,
        names,
        min(MAX_CHOICES, options.max_waiting),
        settings_in_force(engine, options, tiers),
        mending or {},
    )


def _settings(engine: Engine, options: EngineOptions) -> dict[str, object]:
    """The settings that the simulator needs; no paths."""
    offloader = engine.offloader
    return {
        "penstock": VERSION,
        "device_blocks": engine.pool.num_blocks,
        "host_blocks": 0 if offloader is None else offloader.num_host_blocks,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.max_num_seqs,
    }


def settings_in_force(
    engine: Engine, options: EngineOptions, tiers: Config | None
) -> dict[str, dict[str, object]]:
    """The settings in force, for the dashboard: without passwords and keys."""
    given = asdict(options)
    for name in _OF_TIERS:
        del given[name]  # `describe` has them, with URLs that are safe to show
    own = {
        **given,
        "device": str(engine.loaded.device),
        "dtype": str(engine.loaded.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(engine.kv_dtype).removeprefix("torch."),
        "block_tokens": engine.block_tokens,
        "device_blocks": engine.pool.num_blocks,
        "max_model_len": engine.loaded.max_tokens,
    }
    return {"engine": own} if tiers is None else {"engine": own, **describe(tiers)}


def default_name(model: str) -> str:
    """The name of a folder or file without its path, which clients need not know."""
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model


class RecoveryTeller:
    """An observer that reports the progress of reading the disk's index, in a few steps."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._num_told = 0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Recovered) or event.num_blocks == 0:
            return
        if event.complete:
            found = counted(event.num_blocks, "block")
            self._tell(f"{event.tier.label}: {found} recovered")
            return
        step = event.num_scanned * _STEPS // max(1, event.num_slots)
        if step > self._num_told:
            self._num_told = step
            self._tell(f"{event.tier.label}: {step * 100 // _STEPS}% of the index read")
