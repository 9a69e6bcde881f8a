"""The engine as the endpoints see it: on its way, at work, stopping, or dead."""

from __future__ import annotations

import time
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
    """How many tokens have gone out to clients; the loop's."""

    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded model: its service, its names, and the way to its tokens."""

    service: Service
    prompts: Prompts
    names: tuple[str, ...]  # what clients may call it; answers and lists begin with the first
    max_choices: int  # sequences that one request may ask for
    settings: dict[str, dict[str, object]] = field(default_factory=dict)  # in force, to be seen
    created: int = field(default_factory=lambda: int(time.time()))
    spoken: Spoken = field(default_factory=Spoken)

    @property
    def max_tokens(self) -> int:
        """The longest context, of prompt and answer together."""
        return self.service.engine.loaded.max_tokens

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.service.engine.loaded.weights_fingerprint[:12]}"

    def check_name(self, name: str | None) -> str:
        """The name to answer under; None stands for the only model there is."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = " or ".join(self.names)
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here: expected {known}.",
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
        """Who wants to hear what the engine tells."""
        return (self.metrics, self.stories)

    @property
    def serving(self) -> Serving | None:
        """The model, once it is loaded; whatever has become of it since."""
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
        """Take no new requests; those there are go on."""
        self._stopping = True

    def require(self) -> Serving:
        """The model, or an ApiError that says why not and when to ask again."""
        match self.phase:
            case BackendPhase.LOADING:
                raise ApiError(
                    503,
                    "the model is still being loaded; ask again soon.",
                    code="loading",
                    retry_after_seconds=_LOADING_RETRY_SECONDS,
                )
            case BackendPhase.STOPPING:
                raise ApiError(
                    503,
                    "the server is shutting down; ask another instance, or later.",
                    code="stopping",
                    headers={"Connection": "close"},
                    retry_after_seconds=_STOPPING_RETRY_SECONDS,
                )
            case BackendPhase.FAILED:
                raise ApiError(
                    503,
                    "the engine has failed and cannot recover, and its log says why; the server "
                    "ends: restart it.",
                    code="failed",
                )
        assert self._serving is not None
        return self._serving
