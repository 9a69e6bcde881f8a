"""Events of a node that its clients observe too, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from penstock.events import (
    Asked,
    Damaged,
    Event,
    Prefetched,
    Recovered,
    Removed,
    Retained,
    Stored,
    TierEmptied,
    TierRested,
    TierRevived,
    TierUsage,
)
from penstock.node.wire import WireError, pack_keys, unpack_keys
from penstock.types import Direction, Tier

# The state of the tiers that clients share. What a client has done, it reports itself; what the
# node moved between its own tiers, only the node counts.
_SHARED: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(Asked, Damaged, Prefetched, Recovered, Removed, Retained, Stored),
        *(TierEmptied, TierRested, TierRevived, TierUsage),
    )
}
_WITH_KEYS = (Stored, Removed)


def is_shared(event: Event) -> bool:
    return type(event).__name__ in _SHARED


def pack_event(event: Event) -> tuple[dict[str, Any], bytes]:
    """The fields of an event, and its keys."""
    packed: dict[str, Any] = {"event": type(event).__name__}
    keys = b""
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "keys":
            keys = pack_keys(value)
        else:
            packed[field.name] = value.value if isinstance(value, Enum) else value
    return packed, keys


def unpack_event(packed: Mapping[str, Any], keys: bytes) -> Event:
    values = dict(packed)
    cls = _SHARED.get(str(values.pop("event", "")))
    if cls is None:
        raise WireError("an event of a kind that is not known was received")
    try:
        if "tier" in values:
            values["tier"] = Tier(values["tier"])
        if "direction" in values:
            values["direction"] = Direction(values["direction"])
        if cls in _WITH_KEYS:
            values["keys"] = unpack_keys(keys)
        event: Event = cls(**values)
    except (TypeError, ValueError) as error:
        raise WireError(f"an event cannot be read: {error}") from None
    return event
