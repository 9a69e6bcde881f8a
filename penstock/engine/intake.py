"""Whether this model can serve the values of a request: the one place that judges them.

It is asked in the caller's thread, before the engine's own sees the request: an index beyond the
vocabulary would fail a whole step there, and on a GPU the process. `SamplingParams` has judged what
can be judged without a model.
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
        """The prompt's token ids. Raises ConfigError if the request cannot be served."""
        if not isinstance(params, SamplingParams):
            raise ConfigError(
                f"sampling parameters are {reprlib.repr(params)}; expected SamplingParams."
            )
        for name, named in params.named_token_ids.items():
            if named:
                self._check_range(f"{name} has", named)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ConfigError(
                f"priority is {reprlib.repr(priority)}; expected a whole number, lower first."
            )
        self.check_tenant(tenant)
        ids = self.check_prompt(prompt_ids)
        if not ids:
            raise ConfigError("the prompt is empty; expected at least one token.")
        return ids

    def check_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The token ids of a prompt, or of none. Raises ConfigError."""
        try:
            ids = tuple(map(index, prompt_ids))
        except TypeError:
            raise ConfigError(
                f"the prompt is {reprlib.repr(prompt_ids)}; expected a list of token ids, which "
                "are whole numbers."
            ) from None
        if ids:
            self._check_range("the prompt has", ids)
        return ids

    @staticmethod
    def check_tenant(tenant: str) -> None:
        """Raises ConfigError for a name that no key can hold."""
        try:
            tenant.encode()
        except (AttributeError, UnicodeEncodeError):
            raise ConfigError(
                f"the tenant is {reprlib.repr(tenant)}; expected a string of whole characters."
            ) from None

    def _check_range(self, what: str, ids: Sequence[int]) -> None:
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ConfigError(
                f"{what} token ids from {min(ids)} to {max(ids)}; expected 0 to "
                f"{self._vocab_size - 1}, as this model's tokenizer gives them."
            )
