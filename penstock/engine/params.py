"""How the tokens of one request are chosen, and when they end: vLLM's names and defaults.

Everything is judged when it is made, so that no later part of the engine meets a value it cannot
serve. No torch here: a server may check a request without loading it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeGuard

from penstock.errors import ConfigError
from penstock.hints import Hints

MAX_LOGPROBS = 20
MAX_N = 16_384  # vLLM's
MAX_BIASES = 1024
_MAX_BIAS = 100.0  # beyond it a token is as good as certain, or banned


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
    """The value as a float from low to high; NaN and infinities are never inside."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        try:
            as_float = float(value)
        except OverflowError:  # a whole number beyond any float
            as_float = math.inf
        if math.isfinite(as_float):
            return as_float
    raise _refuse(name, value, expected)


def _strings(value: object) -> tuple[str, ...]:
    expected = "a string or a list of strings, none of them empty"
    listed = (value,) if isinstance(value, str) else () if value is None else value
    # A set would lose the order in which stop strings were given.
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
        raise _refuse("stop_token_ids", value, "a list of whole numbers of at least 0")
    return tuple(listed)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """As pairs, by token id; in vLLM's way a bias beyond 100 is taken as 100."""
    pairs = () if value is None else value
    if isinstance(pairs, Mapping):
        pairs = tuple(pairs.items())
    expected = f"at most {MAX_BIASES} token ids of at least 0, each with a number"
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
    """Where one request wants its KV while it runs. None: as the engine is set."""

    prefix_tokens: int | None = None  # the first so many stay on the device if they can
    tail_tokens: int | None = None  # the last so many
    device_tokens: int | None = None  # of all, no more than so many if others need room
    never_cold: bool = False  # all of it on the device, or the request waits

    def __post_init__(self) -> None:
        for name, low in (("prefix_tokens", 0), ("tail_tokens", 0), ("device_tokens", 1)):
            value = getattr(self, name)
            if value is not None:
                expected = f"a whole number of at least {low}"
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
            raise _refuse("kv_residency", value, f"some of {', '.join(names)}")
        return cls(**value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's wishes. `stop`, `stop_token_ids` and `logit_bias` are held as tuples, whatever
    was given."""

    n: int = 1  # answers to one prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # of the likeliest tokens, those that together have this share
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # of the likeliest token's probability, what others must have
    seed: int | None = None  # None or -1: not reproducible
    stop: str | Sequence[str] | None = None  # ends the answer, and is not part of it
    stop_token_ids: Sequence[int] | None = None  # the same as token ids
    max_tokens: int | None = 16  # None: as many as the model's context holds
    min_tokens: int = 0  # before so many, nothing ends the answer
    logprobs: int | None = None  # 0: of the chosen token only
    ignore_eos: bool = False  # go on behind the model's own end
    repetition_penalty: float = 1.0  # above 1: less of what prompt and answer have had
    presence_penalty: float = 0.0  # subtracted once for what the answer has had
    frequency_penalty: float = 0.0  # subtracted for each time
    skip_special_tokens: bool = True  # in the text
    include_stop_str_in_output: bool = False  # the text ends with what stopped it
    logit_bias: Mapping[int, float] | None = None  # added to a token's logit, from -100 to 100
    kv_residency: KvResidency | Mapping[str, object] | None = None  # where its KV lies meanwhile
    kv_hints: Hints | Mapping[str, object] | None = None  # what becomes of its KV: docs/hints.md

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
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("kv_residency", KvResidency.of(self.kv_residency))
        self._set("kv_hints", Hints.of(self.kv_hints))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether tokens that came before change what comes next."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, as the type checker cannot know it: always a tuple."""
        return _strings(self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias`, always as pairs of token id and bias."""
        return _biases(self.logit_bias)

    @property
    def residency(self) -> KvResidency:
        """`kv_residency`, always one."""
        return KvResidency.of(self.kv_residency)

    @property
    def hints(self) -> Hints:
        """`kv_hints`, always some."""
        return Hints.of(self.kv_hints)

    @property
    def named_token_ids(self) -> Mapping[str, tuple[int, ...]]:
        """Every token id that a request names, by field: an engine knows which there are."""
        return {
            "stop_token_ids": self.stop_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.biases),
        }

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, always a tuple."""
        return _ids(self.stop_token_ids)

    def _check_whole_numbers(self) -> None:
        _whole("n", self.n, 1, MAX_N, f"a whole number from 1 to {MAX_N}")
        _whole("top_k", self.top_k, -1, None, "a whole number of at least 1, or 0 or -1 for off")
        _whole("min_tokens", self.min_tokens, 0, None, "a whole number of at least 0")
        if self.seed is not None:
            fits = "a whole number that fits in 64 bits"
            _whole("seed", self.seed, -(2**63), 2**64 - 1, fits)
            if self.seed == -1:  # as vLLM reads it
                self._set("seed", None)
        if self.logprobs is not None:
            most = f"a whole number from 0 to {MAX_LOGPROBS}"
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, most)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None, "a whole number of at least 1")
            if self.min_tokens > self.max_tokens:
                most = f"at most max_tokens, which is {self.max_tokens}"
                raise _refuse("min_tokens", self.min_tokens, most)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: only while it is being made
