"""Names LoRA adapters by their weights.

vLLM reads an adapter's files when it needs them: at the first request, when a user loads it, after
it was evicted, and at every step for a request with `load_inplace`. The connector is not notified.
So the digest of the files names an adapter only if they have not changed since before this process
started. Other processes then find the same name.

    files                                             name
    older than this process, never changed since      their digest
    newer, or users may load adapters at run time     valid for this run only, with the adapter's id
    changed since first used, one id for two          none: its requests are neither loaded nor
      adapters, `load_inplace`, read by tensorizer,     saved
      not found on this machine
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.connectors.vllm.fingerprint import (
    FilesState,
    fingerprint_files,
    is_unchanged,
    process_start,
    state_of,
)
from penstock.connectors.vllm.places import find_files

log = logging.getLogger(__name__)

_UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


@dataclass(frozen=True, slots=True)
class _Seen:
    """The files of an adapter's id when it was first used."""

    path: str
    place: Path
    state: FilesState
    name: str


class Adapters:
    """The names of one engine's adapters. `settings`, from its configuration, is part of each."""

    def __init__(
        self,
        settings: str = "",
        *,
        started: float | None = None,
        may_change: bool | None = None,
    ) -> None:
        self._settings = settings
        self._started = process_start() if started is None else started
        self._may_change = _may_change() if may_change is None else may_change
        self._run = secrets.token_hex(16)
        self._seen: dict[int, _Seen] = {}
        self._unknown: dict[int, str] = {}  # ids whose weights are not certain, and why

    def name(self, lora_request: Any) -> str | None:
        """None if it is not certain which weights vLLM uses for this request."""
        number = lora_request.lora_int_id
        if getattr(lora_request, "load_inplace", False):
            self._leave(lora_request, "with load_inplace its weights may change at any step")
        if getattr(lora_request, "tensorizer_config_dict", None):  # not in all versions of vLLM
            self._leave(lora_request, "tensorizer reads its weights from elsewhere")
        if number in self._unknown:
            return None
        path = str(lora_request.lora_path)
        seen = self._seen.get(number)
        if seen is None:
            return self._first(lora_request, path)
        if seen.path != path:
            self._leave(lora_request, f"its id {number} was also used for {seen.path}")
            return None
        if _find(path) != seen.place or not is_unchanged(seen.state):
            self._leave(lora_request, "its files have changed since it was first used")
            return None
        return seen.name

    def _first(self, lora_request: Any, path: str) -> str | None:
        place = _find(path)
        state = None if place is None else _state(place)
        found = None if place is None else fingerprint_files(place)
        if place is None or state is None or found is None:
            self._leave(lora_request, "its files are not on this machine, or cannot be read")
            return None
        number = lora_request.lora_int_id
        if self._may_change or state.changed >= self._started:
            found = f"run {self._run} id {number} {found}"
        if getattr(lora_request, "is_3d_lora_weight", False):
            found += " 3d"
        seen = _Seen(path, place, state, f"{found} {self._settings}".strip())
        self._seen[number] = seen
        return seen.name

    def _leave(self, lora_request: Any, why: str) -> None:
        if lora_request.lora_int_id not in self._unknown:
            self._unknown[lora_request.lora_int_id] = why
            log.warning(
                "Requests with the LoRA adapter %s are not offloaded: %s.",
                lora_request.lora_name,
                why,
            )


def _find(path: str) -> Path | None:
    return find_files(path, None, "adapter_config.json", None)


def _state(place: Path) -> FilesState | None:
    try:
        return state_of(place)
    except OSError:  # deleted meanwhile
        return None


def _may_change() -> bool:
    """Whether users may load adapters while vLLM's server runs."""
    return os.environ.get(_UPDATING, "0").strip().lower() in {"1", "true"}
