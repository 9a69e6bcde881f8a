"""Samples from Prometheus's text format: a server's /metrics at one time. Pure.

    # HELP penstock_hit_blocks_total Blocks found, by tier.
    penstock_hit_blocks_total{model_name="m",tier="host"} 1024.0

Labels of the client, such as vLLM's `model_name` and `engine`, are summed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ConfigError

PREFIX = "penstock_"
_GAUGES = (
    "penstock_used_blocks",
    "penstock_capacity_blocks",
    "penstock_leased_blocks",
    "penstock_queued_transfers",
    "penstock_tier_resting",
    "penstock_recovered_ratio",
    "penstock_sequences",
    "penstock_resident_share",
    "penstock_retained_blocks",
    "penstock_retainable_blocks",
    "penstock_used_tokens",
    "penstock_capacity_tokens",
    "penstock_block_bytes",
    "penstock_tier_codec_info",
)
_MAX_LINE_CHARS = 1 << 16

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Samples:
    values: Mapping[Key, float]

    @cached_property
    def _by_name(self) -> Mapping[str, list[tuple[frozenset[tuple[str, str]], float]]]:
        found: dict[str, list[tuple[frozenset[tuple[str, str]], float]]] = {}
        for (name, labels), value in self.values.items():
            found.setdefault(name, []).append((labels, value))
        return found

    def __bool__(self) -> bool:
        return bool(self.values)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples with that name and these labels; 0 if there are none."""
        wanted = frozenset(labels.items())
        return sum((value for has, value in self._by_name.get(name, ()) if wanted <= has), 0.0)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Like `total`, for each value of `label`."""
        wanted = frozenset(labels.items())
        sums: dict[str, float] = {}
        for has, value in self._by_name.get(name, ()):
            if wanted <= has and (own := dict(has).get(label)) is not None:
                sums[own] = sums.get(own, 0.0) + value
        return dict(sorted(sums.items()))

    def since(self, before: Samples) -> Samples:
        """What was counted since `before`. Gauges keep their current values.

        If a counter has decreased, the server was restarted, and all of it is new.
        """
        return Samples(
            {
                key: value if _is_gauge(key[0]) else _grown(value, before.values.get(key, 0.0))
                for key, value in self.values.items()
            }
        )


def read_samples(text: str, prefixes: tuple[str, ...] = (PREFIX,)) -> Samples:
    """The finite samples whose names begin with one of `prefixes`.

    Raises ConfigError if the text is not in Prometheus's text format.
    """
    values: dict[Key, float] = {}
    is_empty = True
    # One line at a time: an error names its line, and a sample keeps the name it was written with
    # (with its TYPE line, the parser appends "_total" to some counters).
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        is_empty = False
        name, labels, value = _parse(line, number)
        if name.startswith(prefixes) and math.isfinite(value):
            key = (name, frozenset(labels.items()))
            values[key] = values.get(key, 0.0) + value
    if is_empty:
        raise ConfigError("there is no metric in it: expected Prometheus's text format")
    return Samples(values)


def _parse(line: str, number: int) -> tuple[str, dict[str, str], float]:
    # Imported here, so that commands that read no metrics start faster.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        if len(line) > _MAX_LINE_CHARS:  # the parser's time grows with the square of the length
            raise ValueError
        ((sample,),) = (family.samples for family in text_string_to_metric_families(line))
        return sample.name, sample.labels, float(sample.value)
    except (ValueError, LookupError, OverflowError):
        raise ConfigError(
            f"line {number} is {line[:80]!r}: expected a name and a number, in Prometheus's text "
            "format"
        ) from None


def _is_gauge(name: str) -> bool:
    return name in _GAUGES


def _grown(value: float, before: float) -> float:
    return value - before if value >= before else value
