"""Sends small tensors to a GPU without its copy engines, and without waiting.

A copy of a few numbers would queue behind loads that are running there, and delay the step. A
kernel that reads pinned DRAM does not (see `mailbox` for the other direction).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # untyped

_WORD_BYTES = 8
_lock = threading.Lock()
# Pinned memory, each with what says that it has been read. Torch would use it again before: it
# knows of copies, not of kernels.
_held: deque[tuple[Any, Tensor]] = deque()


def sent(values: Tensor, like: Tensor) -> Tensor:
    """The same values on the device of `like`. Whatever is queued there next may read them."""
    return (
        pulled(values, like.device) if like.is_cuda and values.numel() else values.to(like.device)
    )


def pulled(values: Tensor, device: torch.device) -> Tensor:
    """`sent`, by a kernel. There must be values."""
    from penstock.engine.attention.triton import pull_words

    on_gpu = device.type == "cuda"
    size = values.numel() * values.itemsize
    # Whole words of one type, so that one kernel suffices.
    num_words = -(-size // _WORD_BYTES)
    staged = torch.empty(num_words, dtype=torch.int64, pin_memory=on_gpu)
    staged.view(torch.uint8)[:size] = values.contiguous().flatten().view(torch.uint8)
    words = torch.empty(num_words, dtype=torch.int64, device=device)
    pull_words(staged.data_ptr(), words)
    done = _cuda.Event()
    done.record()
    with _lock:
        _held.append((done, staged))
        while _held and _held[0][0].query():
            _held.popleft()
    return words.view(torch.uint8)[:size].view(values.dtype).view(values.shape)
