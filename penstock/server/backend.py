"""The engine as the endpoints see it: loading, serving, stopping or failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.events import Observer
from penstock.metrics import Metrics
from penstock.server.errors import ApiError
from penstock.server.stories import Stories

if TYPE_CHECKING:
    from penstock.engine.service import Service
    from penstock.server.prompts import Prompts

_LOADING_RETRY_SECONDS = 5.0
_STOPPING_RETRY_SECONDS = 30.0


class BackendPhase(StrEnum):
    LOADING = "loading"
    SERVING = "serving"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(slots=True)
class Spoken:
    """The number of tokens sent to clients. Used only on the event loop."""

    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded model: its service, its names and its tokenizer."""

    service: Service
    prompts: Prompts
    names: tuple[str, ...]  # that clients may use; the first is the default
    max_choices: int  # per request
    settings: dict[str, dict[str, object]] = field(default_factory=dict)  # for the dashboard
    mending: Mapping[str, object] = field(default_factory=dict)  # of requests that say nothing
    created: int = field(default_factory=lambda: int(time.time()))
    spoken: Spoken = field(default_factory=Spoken)

    @property
    def max_tokens(self) -> int:
        """The longest context: prompt and answer together."""
        return self.service.engine.loaded.max_tokens

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.service.engine.loaded.weights_fingerprint[:12]}"

    def check_name(self, name: str | None) -> str:
        """The model name for the response. None means the only model. Raises ApiError."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = " or ".join(self.names)
            raise ApiError(
                404,
                f"there is no model {name[:200]!r}: expected {known}.",
                param="model",
                code="model_not_found",
            )
        return name


class Backend:
    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.stories = Stories()
        self._serving: Serving | None = None
        self._stopping = False

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Observers of the engine's events."""
        return (self.metrics, self.stories)

    @property
    def serving(self) -> Serving | None:
        """The model once it is loaded, even if it has failed since."""
        return self._serving

    @property
    def phase(self) -> BackendPhase:
        if self._serving is not None and self._serving.service.failure is not None:
            return BackendPhase.FAILED
        if self._stopping:
            return BackendPhase.STOPPING
        return BackendPhase.LOADING if self._serving is None else BackendPhase.SERVING

    def serve(self, serving: Serving) -> None:
        self._serving = serving

    def stop(self) -> None:
        """Refuse new requests; running ones continue."""
        self._stopping = True

    def require(self) -> Serving:
        """The loaded model. Raises ApiError (503) if requests cannot be served now."""
        match self.phase:
            case BackendPhase.LOADING:
                raise ApiError(
                    503,
                    "the model is still loading; retry soon.",
                    code="loading",
                    retry_after_seconds=_LOADING_RETRY_SECONDS,
                )
            case BackendPhase.STOPPING:
                raise ApiError(
                    503,
                    "the server is shutting down; retry later, or use another instance.",
                    code="stopping",
                    headers={"Connection": "close"},
                    retry_after_seconds=_STOPPING_RETRY_SECONDS,
                )
            case BackendPhase.FAILED:
                raise ApiError(
                    503,
                    "the engine has failed and cannot recover (see the server's log); the server "
                    "exits: restart it.",
                    code="failed",
                )
        assert self._serving is not None
        return self._serving
