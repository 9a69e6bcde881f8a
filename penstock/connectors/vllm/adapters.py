"""LoRA adapters, named by the weights that vLLM computes with.

vLLM reads an adapter's files when it needs them: at the first request, when somebody loads it by
hand, after it was evicted, and at every step for a request with `load_inplace`. Nobody tells a
connector. So a name holds only while the files cannot have been anything else: unchanged since
before this process began. Then it is the digest of the files, and other processes find it.

    files                                             name
    older than this process, never changed since      their digest
    newer, or adapters may be loaded while serving    of this run alone, with the adapter's id
    changed since a request was first seen, an id     none: neither loaded nor saved
      used for two adapters, `load_inplace`, read
      by tensorizer, not found on this machine
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
    """What stood behind an adapter's id when it was first asked for."""

    path: str
    place: Path
    state: FilesState
    name: str


class Adapters:
    """The names of the adapters of one engine. `settings` is what its configuration adds."""

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
        self._unknown: dict[int, str] = {}  # ids that may stand for several weights, and why

    def name(self, lora_request: Any) -> str | None:
        """None if nobody can say with which weights vLLM computes this request."""
        number = lora_request.lora_int_id
        if getattr(lora_request, "load_inplace", False):
            self._leave(lora_request, "it is loaded in place: its weights may change at any step")
        if getattr(lora_request, "tensorizer_config_dict", None):  # not in all versions of vLLM
            self._leave(lora_request, "tensorizer reads its weights from another place")
        if number in self._unknown:
            return None
        path = str(lora_request.lora_path)
        seen = self._seen.get(number)
        if seen is None:
            return self._first(lora_request, path)
        if seen.path != path:
            self._leave(lora_request, f"its id {number} also stands for {seen.path}")
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
                "requests with the LoRA adapter %s are served without offloading: %s.",
                lora_request.lora_name,
                why,
            )


def _find(path: str) -> Path | None:
    return find_files(path, None, "adapter_config.json", None)


def _state(place: Path) -> FilesState | None:
    try:
        return state_of(place)
    except OSError:  # gone since
        return None


def _may_change() -> bool:
    """Whether vLLM's server lets its users load adapters while it runs."""
    return os.environ.get(_UPDATING, "0").strip().lower() in {"1", "true"}
