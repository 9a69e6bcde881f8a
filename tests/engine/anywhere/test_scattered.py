"""Attention of scattered tokens: the kernel and torch, against one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.engine.attention.by_rules import attend_by_rules
from penstock.engine.attention.rules import CAUSAL
from penstock.engine.attention.scattered_triton import attend_scattered

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
SHAPES = [(4, 2, 16), (3, 3, 64), (8, 1, 20)]  # heads, kv_heads, head_dim
ROWS = {
    "one": [37],
    "the first": [0, 1, 2],
    "scattered": [0, 3, 4, 63, 64, 65, 90, 128, 129, 199],
    "more than a tile": [*range(5, 75), *range(80, 200, 3)],
}


def one_by_one(query: Tensor, key: Tensor, value: Tensor, rows: list[int], scale: float) -> Tensor:
    found = []
    for q, end in zip(query.double(), rows, strict=True):
        group = query.shape[1] // key.shape[1]
        k, v = (each[: end + 1].double().repeat_interleave(group, 1) for each in (key, value))
        weights = (torch.einsum("hd,thd->ht", q, k) * scale).softmax(-1)
        found.append(torch.einsum("ht,thd->hd", weights, v))
    return torch.stack(found)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scattered_tokens(rows: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, dim = shape
    torch.manual_seed(0)
    at = ROWS[rows]
    query = torch.randn(len(at), heads + 2, dim).to(dtype)[:, 1:-1].to(DEVICE)  # not contiguous
    key, value = torch.randn(2, 208, kv_heads, dim).to(dtype).to(DEVICE)
    positions = torch.tensor(at, device=DEVICE)
    expected = one_by_one(query, key, value, at, 0.3)
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    for attend in (attend_scattered, attend_by_rules):
        found = attend(query, key, value, positions, 0.3, CAUSAL)
        assert found.shape == query.shape
        assert float((found.double() - expected).abs().max()) < limit
