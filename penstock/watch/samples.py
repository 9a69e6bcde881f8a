"""Prometheus's text format, read: what a server's /metrics said at one time. Pure.

    # HELP penstock_hit_blocks_total Blocks found, by tier.
    penstock_hit_blocks_total{model_name="m",tier="host"} 1024.0

A host's own labels (vLLM has `model_name` and `engine`) stand beside ours and are summed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
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
)
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*", re.ASCII)
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?', re.ASCII)
_ESCAPE = re.compile(r"\\(.)")

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
        """The sum of all samples of that name whose labels include these; 0 for none."""
        wanted = frozenset(labels.items())
        return sum((value for has, value in self._by_name.get(name, ()) if wanted <= has), 0.0)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The same, apart by one label's values."""
        wanted = frozenset(labels.items())
        sums: dict[str, float] = {}
        for has, value in self._by_name.get(name, ()):
            if wanted <= has and (own := dict(has).get(label)) is not None:
                sums[own] = sums.get(own, 0.0) + value
        return dict(sorted(sums.items()))

    def since(self, before: Samples) -> Samples:
        """What has been counted since `before`; gauges as they are now.

        A counter that fell belongs to a server that was started anew: then all of it is new.
        """
        return Samples(
            {
                key: value if _is_gauge(key[0]) else _grown(value, before.values.get(key, 0.0))
                for key, value in self.values.items()
            }
        )


def read_samples(text: str, prefixes: tuple[str, ...] = (PREFIX,)) -> Samples:
    """Those whose names begin so; the rest is passed over.

    Raises ConfigError where it is no such text.
    """
    values: dict[Key, float] = {}
    num_lines = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        num_lines += 1
        match = _SAMPLE.fullmatch(line.strip())
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            match = None
        if match is None:
            raise ConfigError(
                f"line {number} is {line[:80]!r}: expected Prometheus's text format, a name and "
                "a number"
            )
        if match[1].startswith(prefixes) and math.isfinite(value):
            key = (match[1], frozenset(_labels(match[2] or "")))
            values[key] = values.get(key, 0.0) + value
    if num_lines == 0:
        raise ConfigError("there is no metric in it: expected Prometheus's text format")
    return Samples(values)


def _labels(text: str) -> Iterable[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)


def _is_gauge(name: str) -> bool:
    return name in _GAUGES


def _grown(value: float, before: float) -> float:
    return value - before if value >= before else value
