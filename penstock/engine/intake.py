"""Validates a request against the model: the only place that does.

It runs in the caller's thread, before the engine sees the request. A token id outside the
vocabulary would fail a whole step there and, on a GPU, the process. `SamplingParams` has already
validated what needs no model.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from operator import index

from penstock.engine.params import SamplingParams
from penstock.errors import ConfigError


class Intake:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def check(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> tuple[int, ...]:
        """Return the prompt's token ids. Raises ConfigError if the request cannot be served."""
        if not isinstance(params, SamplingParams):
            raise ConfigError(
                f"sampling parameters are {reprlib.repr(params)}; expected SamplingParams."
            )
        for name, named in params.named_token_ids.items():
            if named:
                self._check_range(f"{name} has", named)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ConfigError(
                f"priority is {reprlib.repr(priority)}; expected an integer (lower runs first)."
            )
        self.check_tenant(tenant)
        ids = self.check_prompt(prompt_ids)
        if not ids:
            raise ConfigError("the prompt is empty; expected at least one token.")
        return ids

    def check_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of a prompt, which may be empty. Raises ConfigError."""
        try:
            ids = tuple(map(index, prompt_ids))
        except TypeError:
            raise ConfigError(
                f"the prompt is {reprlib.repr(prompt_ids)}; expected a list of integer token ids."
            ) from None
        if ids:
            self._check_range("the prompt has", ids)
        return ids

    @staticmethod
    def check_tenant(tenant: str) -> None:
        """Raise ConfigError if the name cannot be encoded in a block's key."""
        try:
            tenant.encode()
        except (AttributeError, UnicodeEncodeError):
            raise ConfigError(
                f"the tenant is {reprlib.repr(tenant)}; expected a string that is valid Unicode."
            ) from None

    def _check_range(self, what: str, ids: Sequence[int]) -> None:
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ConfigError(
                f"{what} token ids from {min(ids)} to {max(ids)}; expected 0 to "
                f"{self._vocab_size - 1}, the ids of this model's tokenizer."
            )
