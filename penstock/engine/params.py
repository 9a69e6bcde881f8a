"""Sampling parameters of one request, with vLLM's names and defaults.

Every value is checked when the object is made, so the rest of the engine never sees an invalid one.
This module does not import torch: a server can check a request without it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeGuard

from penstock.engine.structure import StructuredOutputsParams
from penstock.errors import ConfigError
from penstock.hints import Hints

MAX_LOGPROBS = 20
MAX_N = 16_384  # as in vLLM
MAX_BIASES = 1024
_MAX_BIAS = 100.0  # beyond ±100 a token is practically certain, or banned


def _refuse(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"sampling parameter {name} is {reprlib.repr(value)}: expected {expected}; correct it, "
        "or leave it out for the default"
    )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: object, low: int, high: int | None, expected: str) -> None:
    if not (_is_whole(value) and value >= low and (high is None or value <= high)):
        raise _refuse(name, value, expected)


def _number(name: str, value: object, low: float, high: float, expected: str) -> float:
    """The value as a finite float from `low` to `high`. Raises ConfigError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        try:
            as_float = float(value)
        except OverflowError:  # an int too large for a float
            as_float = math.inf
        if math.isfinite(as_float):
            return as_float
    raise _refuse(name, value, expected)


def _strings(value: object) -> tuple[str, ...]:
    expected = "a non-empty string or a list of them"
    listed = (value,) if isinstance(value, str) else () if value is None else value
    # Sets are refused because they lose the order of the stop strings.
    if not isinstance(listed, Sequence) or isinstance(listed, (bytes, bytearray)):
        raise _refuse("stop", value, expected)
    if not all(isinstance(item, str) and item for item in listed):
        raise _refuse("stop", value, expected)
    return tuple(listed)


def _ids(value: object) -> tuple[int, ...]:
    listed = () if value is None else value
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes, bytearray)):
        raise _refuse("stop_token_ids", value, "a list of token ids")
    if not all(_is_whole(item) and item >= 0 for item in listed):
        raise _refuse("stop_token_ids", value, "a list of integers of at least 0")
    return tuple(listed)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, sorted by token id. As in vLLM, biases are clamped to ±100."""
    pairs = () if value is None else value
    if isinstance(pairs, Mapping):
        pairs = tuple(pairs.items())
    expected = f"a mapping of at most {MAX_BIASES} token ids (0 or larger) to numbers"
    if not isinstance(pairs, tuple) or len(pairs) > MAX_BIASES:
        raise _refuse("logit_bias", value, expected)
    found: dict[int, float] = {}
    for token_id, bias in pairs:
        if not (_is_whole(token_id) and token_id >= 0):
            raise _refuse("logit_bias", value, expected)
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or bias != bias:
            raise _refuse("logit_bias", value, expected)
        found[token_id] = float(min(_MAX_BIAS, max(-_MAX_BIAS, bias)))
    return tuple(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class KvResidency:
    """Where one request's KV should be while it runs. None means the engine's own setting."""

    prefix_tokens: int | None = None  # first tokens to keep on the device if possible
    tail_tokens: int | None = None  # last tokens to keep on the device if possible
    device_tokens: int | None = None  # most tokens on the device when other requests need room
    never_cold: bool = False  # keep all KV on the device; the request waits until it fits

    def __post_init__(self) -> None:
        for name, low in (("prefix_tokens", 0), ("tail_tokens", 0), ("device_tokens", 1)):
            value = getattr(self, name)
            if value is not None:
                expected = f"an integer of at least {low}"
                _whole(f"kv_residency.{name}", value, low, 2**31 - 1, expected)
        if not isinstance(self.never_cold, bool):
            raise _refuse("kv_residency.never_cold", self.never_cold, "true or false")

    @classmethod
    def of(cls, value: object) -> KvResidency:
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise _refuse("kv_residency", value, f"a mapping with any of {', '.join(names)}")
        return cls(**value)


MENDING_MODES = ("link", "blend", "none")


@dataclass(frozen=True, slots=True)
class Mending:
    """Which tokens of a reused segment are computed where they stand. See docs/anywhere.md.

    "link": the first `link_tokens` of each segment. "blend": the share `blend_share` of its tokens
    whose KV changes most. "none": none, for comparison.
    """

    mode: str = "link"
    link_tokens: int = 64
    blend_share: float = 0.15

    def __post_init__(self) -> None:
        if self.mode not in MENDING_MODES:
            raise _refuse("kv_mending.mode", self.mode, f"one of {', '.join(MENDING_MODES)}")
        expected = "an integer from 1 to 4096"
        _whole("kv_mending.link_tokens", self.link_tokens, 1, 4096, expected)
        tiny = math.nextafter(0.0, 1.0)
        expected = "a number above 0 and up to 1"
        share = _number("kv_mending.blend_share", self.blend_share, tiny, 1.0, expected)
        object.__setattr__(self, "blend_share", share)  # the dataclass is frozen

    @property
    def is_blend(self) -> bool:
        return self.mode == "blend"

    @property
    def num_first_tokens(self) -> int:
        """How many tokens at the start of each segment are computed."""
        return self.link_tokens if self.mode == "link" else 0

    @property
    def words(self) -> str:
        """For keys: equal if the same tokens are mended."""
        return f"blend {self.blend_share!r}" if self.is_blend else f"link {self.num_first_tokens}"

    @classmethod
    def of(cls, value: object) -> Mending:
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise _refuse("kv_mending", value, f"a mapping with any of {', '.join(names)}")
        return cls(**value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are sampled, and when generation stops.

    `stop`, `stop_token_ids` and `logit_bias` are stored as tuples, however they were given.
    """

    n: int = 1  # completions per prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # sample from the likeliest tokens whose probabilities add up to this
    top_k: int = 0  # sample from this many of the likeliest tokens; 0 or -1: off
    min_p: float = 0.0  # smallest probability, as a share of the likeliest token's
    seed: int | None = None  # None or -1: not reproducible
    stop: str | Sequence[str] | None = None  # strings that end the text and are not part of it
    stop_token_ids: Sequence[int] | None = None  # token ids that end the text
    max_tokens: int | None = 16  # None: up to the model's context length
    min_tokens: int = 0  # nothing ends the text before this many tokens
    logprobs: int | None = None  # log probabilities per token; 0: only the chosen token's
    ignore_eos: bool = False  # continue after the model's end-of-sequence token
    repetition_penalty: float = 1.0  # above 1: tokens of prompt and output become less likely
    presence_penalty: float = 0.0  # subtracted once from each token that the output contains
    frequency_penalty: float = 0.0  # subtracted for every occurrence in the output
    skip_special_tokens: bool = True  # leave special tokens out of the text
    include_stop_str_in_output: bool = False  # keep the stop string at the end of the text
    logit_bias: Mapping[int, float] | None = None  # added to a token's logit, from -100 to 100
    kv_residency: KvResidency | Mapping[str, object] | None = None  # where its KV is kept
    kv_hints: Hints | Mapping[str, object] | None = None  # how its KV is retained: docs/hints.md
    # Another server computes the prompt's KV: take it from the tiers as it comes, and compute only
    # what does not come. See docs/disaggregation.md.
    awaits_prefill: bool = False
    kv_mending: Mending | Mapping[str, object] | None = None  # of segments: docs/anywhere.md
    # What the answer must look like: docs/engine.md.
    structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        self._check_whole_numbers()
        tiny = math.nextafter(0.0, 1.0)
        for name, low, high, expected in (
            ("temperature", 0.0, math.inf, "a number of at least 0, where 0 is greedy"),
            ("top_p", tiny, 1.0, "a number above 0 and up to 1, where 1 is off"),
            ("min_p", 0.0, 1.0, "a number from 0 to 1, where 0 is off"),
            ("repetition_penalty", 0.01, 100.0, "a number from 0.01 to 100, where 1 is off"),
            ("presence_penalty", -2.0, 2.0, "a number from -2 to 2, where 0 is off"),
            ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2, where 0 is off"),
        ):
            self._set(name, _number(name, getattr(self, name), low, high, expected))
        for name in (
            *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
            "awaits_prefill",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("kv_residency", KvResidency.of(self.kv_residency))
        self._set("kv_hints", Hints.of(self.kv_hints))
        self._set("kv_mending", Mending.of(self.kv_mending))
        self._set("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty applies."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always a tuple."""
        return _strings(self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias`, always as pairs of token id and bias."""
        return _biases(self.logit_bias)

    @property
    def residency(self) -> KvResidency:
        """`kv_residency`, never None."""
        return KvResidency.of(self.kv_residency)

    @property
    def hints(self) -> Hints:
        """`kv_hints`, never None."""
        return Hints.of(self.kv_hints)

    @property
    def mending(self) -> Mending:
        """`kv_mending`, never None."""
        return Mending.of(self.kv_mending)

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """`structured_outputs`, never a mapping."""
        return StructuredOutputsParams.of(self.structured_outputs)

    @property
    def named_token_ids(self) -> Mapping[str, tuple[int, ...]]:
        """The token ids that the request names, by field, to be checked against the vocabulary."""
        return {
            "stop_token_ids": self.stop_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.biases),
        }

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, always a tuple."""
        return _ids(self.stop_token_ids)

    def _check_whole_numbers(self) -> None:
        _whole("n", self.n, 1, MAX_N, f"an integer from 1 to {MAX_N}")
        _whole("top_k", self.top_k, -1, None, "an integer of at least 1, or 0 or -1 for off")
        _whole("min_tokens", self.min_tokens, 0, None, "an integer of at least 0")
        if self.seed is not None:
            fits = "an integer that fits in 64 bits"
            _whole("seed", self.seed, -(2**63), 2**64 - 1, fits)
            if self.seed == -1:  # as in vLLM
                self._set("seed", None)
        if self.logprobs is not None:
            most = f"an integer from 0 to {MAX_LOGPROBS}"
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, most)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None, "an integer of at least 1")
            if self.min_tokens > self.max_tokens:
                most = f"at most max_tokens, which is {self.max_tokens}"
                raise _refuse("min_tokens", self.min_tokens, most)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen
