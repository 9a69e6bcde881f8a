"""Reads hints from a request: `kv_transfer_params` under the key "penstock", and vLLM's `kv_hints`.

vLLM 0.32 carries `kv_hints`, an envelope of actions, and leaves their meaning to who implements
them. Ours have the type `penstock`, with the same payload as in `kv_transfer_params`, or are named
after what they ask for:

    retain     {"session": ..., "retain_seconds": 300}
    prefetch   {"sessions": [...]}
    demote     {"session": ...}
    release    {"session": ...}

Actions of other types are meant for others, and are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.hints import NO_HINTS, Hints

log = logging.getLogger(__name__)

KEY = "penstock"


class TransferParamHints:
    """Invalid hints are ignored with one warning: no request fails because of a hint."""

    def __init__(self) -> None:
        self._has_warned = False

    def of(self, request: Any) -> Hints:
        try:
            return self._read(request)
        except ConfigError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("Invalid hints of a request are ignored: %s", error)
            return NO_HINTS

    def _read(self, request: Any) -> Hints:
        params = getattr(request, "kv_transfer_params", None)
        given = params.get(KEY) if isinstance(params, Mapping) else None
        actions = getattr(getattr(request, "kv_hints", None), "actions", None) or ()
        asked: dict[str, Any] = {}
        for action in actions:
            asked |= _asked_by(action)
        if not asked:
            return Hints.of(given)
        if given is not None and not isinstance(given, Mapping):
            return Hints.of(given)  # which says what is wrong with it
        return Hints.of({**asked, **(given or {})})  # what is said in our own words wins


def _asked_by(action: Any) -> dict[str, Any]:
    """An action of vLLM's `kv_hints`, in our words. Empty if it is not meant for us."""
    kind = getattr(action, "action_type", None)
    payload = getattr(action, "payload", None)
    if kind not in (KEY, "retain", "prefetch", "demote", "release"):
        return {}
    if not isinstance(payload, Mapping):
        raise ConfigError(f"the payload of the action {kind} is {payload!r}: expected a mapping")
    match kind:
        case "prefetch":
            others = set(payload) - {"session", "sessions"}
            if others:
                raise ConfigError(f"the action prefetch has {sorted(others)}: expected sessions")
            one = [payload["session"]] if "session" in payload else []
            return {"prefetch": [*payload.get("sessions", ()), *one]}
        case "demote" | "release":
            return {**payload, "on_end": kind}
    return dict(payload)
