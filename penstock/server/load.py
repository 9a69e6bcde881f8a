"""From a model's name to one that is served; what is slow on the way is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from penstock.config import Config
from penstock.engine.options import EngineOptions
from penstock.errors import ConfigError
from penstock.events import Event, Recovered
from penstock.metrics import Metrics
from penstock.server.backend import Serving
from penstock.server.prompts import Prompts
from penstock.server.schema import MAX_CHOICES

log = logging.getLogger("penstock.server")

_STEPS = 10  # of a long recovery


def load_serving(
    options: EngineOptions,
    tiers: Config | None,
    *,
    metrics: Metrics,
    names: tuple[str, ...],
    tell: Callable[[str], None],
) -> Serving:
    """Open the engine and start it.

    Raises a PenstockError if something cannot be had; nothing stays open.
    """
    # Here, because torch takes seconds, and the server answers meanwhile.
    tell("starting the engine")
    from penstock.engine.open import open_engine
    from penstock.engine.service import Service

    observers = (metrics, RecoveryTeller(tell))
    try:
        engine = open_engine(options, tiers, observers=observers, progress=tell)
    except (MemoryError, RuntimeError) as error:  # torch's, for memory that is not there
        log.debug("the engine could not be opened", exc_info=True)
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(
            f"the engine cannot be opened ({reason}); lower --device-kv-gib or "
            "--kv-offloading-size, or choose a smaller model."
        ) from error
    try:
        prompts = Prompts(engine.loaded.tokenizer, engine.loaded.max_tokens)
    except BaseException:
        engine.close()
        raise
    max_choices = min(MAX_CHOICES, options.max_waiting)
    return Serving(Service(engine), prompts, names or (default_name(options.model),), max_choices)


def default_name(model: str) -> str:
    """A folder or a file by its own name: where it lies is nobody's business but the operator's."""
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model


class RecoveryTeller:
    """An observer that tells how far the disk's index has been read, in a few steps."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._num_told = 0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Recovered) or event.num_blocks == 0:
            return
        if event.complete:
            self._tell(f"{event.tier.label}: {event.num_blocks:,} blocks from before are at hand")
            return
        step = event.num_scanned * _STEPS // max(1, event.num_slots)
        if step > self._num_told:
            self._num_told = step
            self._tell(f"{event.tier.label}: {step * 100 // _STEPS}% of the index read")
