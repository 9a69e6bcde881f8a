"""Windows, sinks and caps in each kernel, against plain matrices in double precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from engine import test_attention
from engine.ruled_models import MODELS
from torch import Tensor

from penstock.engine import fp8
from penstock.engine.attention.by_rules import attend_by_rules
from penstock.engine.attention.rules import LayerRules
from penstock.engine.support import inspect_attention
from penstock.shapes.embedded import embedded_bytes_per_token
from penstock.shapes.model_config import shape_from_fields

SINKS = torch.tensor([0.5, -1.0, 2.0, 9.0])  # one larger than all scores
RULES = {
    "window": LayerRules(window=70),
    "window of one": LayerRules(window=1),
    "cap": LayerRules(cap=1.5),
    "sinks": LayerRules(sinks=SINKS),
    "all": LayerRules(window=70, cap=1.5, sinks=SINKS),
}
LENGTHS = [1, 69, 71, 128, 330]
SCALE = 0.2


def plainly(
    query: Tensor, key: Tensor, value: Tensor, position: int, scale: float, rules: LayerRules
) -> Tensor:
    """Attend with query [heads, dim] of one token to key and value [tokens, kv_heads, dim]."""
    begin = max(0, position + 1 - rules.window) if rules.window else 0
    group = query.shape[0] // key.shape[1]
    k, v = (
        each[begin : position + 1].double().repeat_interleave(group, 1) for each in (key, value)
    )
    scores = torch.einsum("hd,thd->ht", query.double(), k) * scale
    if rules.cap:
        scores = rules.cap * (scores / rules.cap).tanh()
    if rules.sinks is not None:
        scores = torch.cat([scores, rules.sinks.cpu().double()[:, None]], 1)
    weights = scores.softmax(-1)[:, : len(k)]
    return torch.einsum("ht,thd->hd", weights, v)


def chilled(pool: Tensor, host: Tensor, tables: list[list[int]]) -> tuple[Tensor, list[list[int]]]:
    """The same KV, of which much is in HOST."""
    partly, moved = pool.clone(), [list(table) for table in tables]
    for table in moved:
        for index, block in enumerate(table[:-1]):
            if index % 3:
                host[len(host) - 1 - block] = pool[block].to(host.device)
                partly[block] = float("nan")
                table[index] = ~(len(host) - 1 - block)
    return partly, moved


def check(found: Tensor, query: Tensor, pool: Tensor, tables: list[list[int]], rule: str) -> None:
    for row, (table, length) in enumerate(zip(tables, LENGTHS, strict=True)):
        history = pool.cpu().float()[table, 1]
        keys, values = history[:, 0].flatten(0, 1), history[:, 1].flatten(0, 1)
        wanted = plainly(query[row], keys, values, length - 1, SCALE, RULES[rule])
        torch.testing.assert_close(found[row].double().cpu(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_cpu_obeys_them(rule: str) -> None:
    torch.manual_seed(0)
    pool = test_attention.make_pool(120, 2, 32, torch.float32)
    tables = test_attention.make_tables(LENGTHS, 120)
    query = 3 * torch.randn(len(LENGTHS), 4, 32)
    found = test_attention.decode(pool, tables, LENGTHS, 4).attend(query, 1, SCALE, RULES[rule])
    check(found, query, pool, tables, rule)
    host = torch.zeros_like(pool)
    partly, moved = chilled(pool, host, tables)
    batch = test_attention.decode(partly, moved, LENGTHS, 4, host)
    assert torch.equal(batch.attend(query, 1, SCALE, RULES[rule]), found)
    alone = test_attention.decode(pool, tables[-1:], LENGTHS[-1:], 4)
    assert torch.equal(alone.attend(query[-1:], 1, SCALE, RULES[rule])[0], found[-1])


def test_kv_in_8_bits_is_attended_to_as_its_values_in_float32() -> None:
    torch.manual_seed(0)
    pool = test_attention.make_pool(60, 2, 32, fp8.DTYPE)
    wide = pool.float()  # kernels read it by address
    tables = test_attention.make_tables(LENGTHS, 60)
    query = 3 * torch.randn(len(LENGTHS), 4, 32)
    found, wanted = (
        test_attention.decode(each, tables, LENGTHS, 4).attend(query, 1, SCALE, RULES["all"])
        for each in (pool, wide)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rule", RULES)
def test_a_gpus_decode_obeys_them(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from engine import test_triton

    from penstock.engine.attention import triton as kernels

    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "PART_TOKENS", 32)
    monkeypatch.setattr(kernels, "cut_for", lambda _: kernels.DecodeCut(32, 4, 2, 3))
    monkeypatch.setattr(kernels, "_MERGED_PARTS", 4)
    rules = on_device(RULES[rule], test_triton.DEVICE)
    monkeypatch.setattr(kernels, "attend_wave", partial(kernels.attend_wave, rules=rules))
    monkeypatch.setattr(kernels, "merge_parts", partial(kernels.merge_parts, rules=rules))
    pool, host = test_triton.make(64, 32, 2, 32, torch.float32)
    tables = test_triton.make_tables(LENGTHS, 64, 32)
    query = 3 * torch.randn(len(LENGTHS), 4, 32)
    found = test_triton.attend(query, pool, host, tables, LENGTHS, 1)
    check(found, query, pool, tables, rule)
    partly, moved = chilled(pool, host, tables)
    assert torch.equal(test_triton.attend(query, partly, host, moved, LENGTHS, 1), found)
    if rules.window:  # what it hides is not even read
        begin = LENGTHS[-1] - rules.window
        pool[tables[-1][: begin // 32]] = float("nan")
        assert torch.equal(test_triton.attend(query, pool, host, tables, LENGTHS, 1)[-1], found[-1])


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_prompts_obey_them(rule: str, kernel: str) -> None:
    device, attend = torch.device("cpu"), attend_by_rules
    if kernel == "triton":
        pytest.importorskip("triton")
        from engine import test_triton

        from penstock.engine.attention.scattered_triton import attend_scattered

        device, attend = test_triton.DEVICE, attend_scattered
    torch.manual_seed(0)
    key, value = torch.randn(2, 320, 2, 20)
    for at in (range(150, 300), [0, 1, 5, 63, 64, 65, 140, 141, 290], range(5)):
        query = 3 * torch.randn(len(at), 4, 20)
        found = attend(
            query.to(device),
            key.to(device),
            value.to(device),
            torch.tensor(at, device=device),
            SCALE,
            on_device(RULES[rule], device),
        )
        for row, position in enumerate(at):
            wanted = plainly(query[row], key, value, position, SCALE, RULES[rule])
            torch.testing.assert_close(found[row].cpu().double(), wanted, rtol=2e-5, atol=2e-5)


def on_device(rules: LayerRules, device: torch.device) -> LayerRules:
    sinks = None if rules.sinks is None else rules.sinks.to(device)
    return LayerRules(rules.window, rules.cap, sinks)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if "wide" not in kind])
def test_sizes_that_are_shown_are_those_that_are_kept(kind: str) -> None:
    """Wide values are left out: a shape does not know how wide they are."""
    config = MODELS[kind]
    found = inspect_attention(config)
    shape = shape_from_fields(config.to_dict(), kind, bits=16)
    kept = len(found.windows) * 2 * found.num_kv_heads * found.head_dim * 2
    assert embedded_bytes_per_token(shape) == kept
