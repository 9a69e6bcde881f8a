"""What some layers do beyond plain causal attention: windows, sinks and caps.

A layer's keys and values are kept for all tokens, whatever its rules are. Only kernels obey them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerRules:
    window: int = 0  # how many tokens a token attends to, itself included; 0: all
    cap: float = 0.0  # a score becomes cap * tanh(score / cap); 0: it stays as it is
    # For each head, the score of one more token, without a value. It is neither scaled nor capped.
    sinks: Tensor | None = None

    @property
    def is_causal_alone(self) -> bool:
        return not self.window and self.changes_no_score

    @property
    def changes_no_score(self) -> bool:
        return not self.cap and self.sinks is None

    def first_token(self, position: int) -> int:
        """The first token that a token attends to."""
        return max(0, position + 1 - self.window) if self.window else 0


CAUSAL = LayerRules()
