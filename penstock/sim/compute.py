"""How long the device computes: prompts in chunks and answers token by token, in one batch.

A step with chunks of prompts takes the time that `PrefillRate` gives for each, its fixed part once.
A step that only decodes takes a base time (to read the weights once), a little for each sequence,
and the time to read all their KV. If a step does both, the prompts already pay for reading the
weights, so decoding adds only its time beyond the base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.costs.rates import PrefillRate
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.shapes.gpu_rates import GpuRates
    from penstock.shapes.sizing import ModelShape

_WEIGHT_BYTES = 2  # per parameter


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """A step takes `base + sequences * per_sequence + tokens of their context * per_token`."""

    base_seconds: float
    sequence_seconds: float = 0.0
    context_token_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_seconds", "sequence_seconds", "context_token_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected 0 or more seconds")
        if self.base_seconds + self.sequence_seconds <= 0:
            raise ConfigError("a decode step takes no time: expected base_seconds above 0")

    def seconds(self, num_steps: int, num_sequences: int, num_context_tokens: int) -> float:
        """Time of `num_steps` steps of the same sequences, which grow by a token each step."""
        step = self.base_seconds + num_sequences * self.sequence_seconds
        growth = num_sequences * (num_steps - 1) / 2
        return num_steps * (step + self.context_token_seconds * (num_context_tokens + growth))

    def num_steps(self, seconds: float, num_sequences: int, num_context_tokens: int) -> int:
        """The fewest steps that take `seconds` or longer; at least 1."""
        first = self.seconds(1, num_sequences, num_context_tokens)
        half_growth = self.context_token_seconds * num_sequences / 2
        linear = first - half_growth
        if half_growth > 0:
            root = math.sqrt(linear * linear + 4 * half_growth * max(0.0, seconds))
            steps = (root - linear) / (2 * half_growth)
        else:
            steps = seconds / linear
        count = max(1, math.ceil(steps - 1e-9))
        while self.seconds(count, num_sequences, num_context_tokens) < seconds:
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class ComputeRates:
    prefill: PrefillRate
    decode: DecodeRate
    # The end of every step, when tokens are sampled while its KV is already being saved.
    sample_seconds: float = 0.001

    def step_seconds(
        self, chunks: Sequence[tuple[int, int]], num_decoding: int, num_context_tokens: int
    ) -> float:
        """One step: chunks of prompts as (tokens, past tokens), and one token per decoder."""
        decode = 0.0
        if num_decoding:
            decode = self.decode.seconds(1, num_decoding, num_context_tokens)
        if not chunks:
            return decode
        fixed = self.prefill.fixed_seconds
        prefill = sum(self.prefill.seconds(*chunk) - fixed for chunk in chunks) + fixed
        return prefill + max(0.0, decode - self.decode.base_seconds)


# Launching a step's kernels. One H200 took 16.5 ms for 512 tokens of Llama-3.1-8B, of which the
# matrix products take 12.
_LAUNCH_SECONDS = 0.003


def rates_of(
    shape: ModelShape, rates: GpuRates, context_token_bytes: float | None = None
) -> ComputeRates:
    """The rates of a model on a GPU (see `penstock.shapes.gpu_rates`).

    A decode step reads `context_token_bytes` for each token of context; None: those of a token that
    every layer keeps.
    """
    num_params = shape.params_per_token
    if num_params is None or rates.prefill is None:
        raise ConfigError(
            "the model's number of parameters is unknown, so its compute time cannot be "
            "estimated: expected hidden_size, vocab_size and intermediate_size in its config.json; "
            "add them, or choose a known model"
        )
    prefill = replace(rates.prefill, fixed_seconds=_LAUNCH_SECONDS)
    token_bytes = shape.bytes_per_token if context_token_bytes is None else context_token_bytes
    decode = DecodeRate(
        base_seconds=_WEIGHT_BYTES * num_params / rates.memory_bytes_per_second,
        context_token_seconds=token_bytes / rates.memory_bytes_per_second,
    )
    return ComputeRates(prefill, decode)
