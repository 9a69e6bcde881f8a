"""Finds the window in a mask that a model makes for itself.

Our attention gets no masks: it computes them from what each layer asks for. Here a model makes
them, as it would for transformers' own attention, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

RECORDED = "penstock-recorded"  # the name of an attention whose masks are recorded


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Takes a mask's place. Whatever a model does with it, other than passing it on, fails."""

    sees: Callable[..., Any]  # (batch, head, token, other token): whether it attends to the other


def record_masks() -> None:
    """Let models whose attention is `RECORDED` make a `Mask`."""
    from transformers import AttentionMaskInterface

    interface: Any = AttentionMaskInterface
    interface.register(RECORDED, lambda *_, mask_function, **__: Mask(mask_function))


def window_of(mask: Mask | None, num_tokens: int) -> int | None:
    """The window among `num_tokens` tokens, itself included. 0: all; None: it is no window."""
    if mask is None:
        return 0
    window = None
    with torch.device("cpu"):
        others = torch.arange(num_tokens)
        for token in (num_tokens - 1, num_tokens // 2, 7, 1, 0):
            if token >= num_tokens:
                continue
            try:
                seen = mask.sees(0, 0, torch.tensor(token), others)
                seen = seen.expand(num_tokens)
                is_seen = seen.tolist()
            except Exception:  # it depends on more than positions
                return None
            first = is_seen.index(True) if any(is_seen) else num_tokens
            if window is None:
                window = token + 1 - first if first else 0
            start = max(0, token + 1 - window) if window else 0
            if not (seen == ((others >= start) & (others <= token))).all():
                return None
    return window
