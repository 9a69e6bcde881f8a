from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.drawing import nucleus, pick
from penstock.engine.params import SamplingParams
from penstock.engine.sampler import Sampled, SamplerRow, make_generator, sample
from penstock.errors import BookError

GREEDY = SamplingParams(temperature=0)
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="slow without a GPU")
VOCAB = 97  # odd, so that rows of a batch start at odd addresses


def noise(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def stream(logits: torch.Tensor, row: SamplerRow, count: int) -> list[int]:
    return [sample(logits, [row])[0].token_id for _ in range(count)]


def drawn(probabilities: list[float], count: int = 300, **wishes: Any) -> Counter[int]:
    logits = torch.tensor([probabilities]).log()
    return Counter(stream(logits, SamplerRow(SamplingParams(**wishes), make_generator(1)), count))


def test_greedy_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0], [0.0, 0.0, 0.1]])
    assert sample(logits, [SamplerRow(GREEDY)] * 3) == [Sampled(1), Sampled(0), Sampled(2)]


def test_all_greedy_is_one_argmax_and_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("all-greedy batches need no softmax and no row of their own")

    for name in ("softmax", "log_softmax", "rand"):
        monkeypatch.setattr(torch, name, never)
    monkeypatch.setattr("penstock.engine.sampler._choose", never)
    logits = noise(0, rows=8)
    found = sample(logits, [SamplerRow(GREEDY)] * 8)
    assert [each.token_id for each in found] == logits.argmax(-1).tolist()


def test_logits_are_left_alone() -> None:
    logits = noise(0, rows=3)
    before = logits.clone()
    busy = SamplingParams(top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=2, logprobs=3)
    sample(logits, [SamplerRow(busy, make_generator(1), [1, 2], 1, [3])] * 3)
    assert torch.equal(logits, before)


@given(
    seed=st.integers(0, 2**64 - 1),
    place=st.integers(0, 4),
    others=st.integers(0, 1000),
    wishes=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0.0, 3.0),
            "top_p": st.floats(0.01, 1.0),
            "top_k": st.integers(-1, 2 * VOCAB),
            "min_p": st.floats(0.0, 1.0),
            "presence_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.5, 2),
            "logprobs": st.integers(0, 5),
        },
    ),
)
@settings(deadline=None, max_examples=150)
def test_a_row_does_not_see_its_batch(
    seed: int, place: int, others: int, wishes: dict[str, Any]
) -> None:
    params = SamplingParams(seed=seed, **wishes)
    batch = noise(others, rows=5)
    alone = batch[place : place + 1].clone()

    def row() -> SamplerRow:
        return SamplerRow(params, make_generator(params.seed), [3, 4, 4], 1)

    rows = [SamplerRow(SamplingParams(), make_generator(others, n)) for n in range(5)]
    rows[0] = SamplerRow(GREEDY)
    rows[place] = row()
    assert sample(batch, rows)[place] == sample(alone, [row()])[0]


def test_the_same_seed_gives_the_same_tokens() -> None:
    logits = noise(0)
    params = SamplingParams()
    one, two, three = (
        stream(logits, SamplerRow(params, make_generator(seed)), 40) for seed in (7, 7, 8)
    )
    assert one == two != three


def test_generators_of_a_request_differ_from_each_other_and_from_the_next_seed() -> None:
    draws = {
        float(torch.rand((), generator=make_generator(seed, index)))
        for seed in (-3, 0, 7, 8, 2**64 - 1)
        for index in range(3)
    }
    assert len(draws) == 15


def test_no_seed_never_comes_again() -> None:
    assert make_generator(None).initial_seed() != make_generator(None).initial_seed()


def test_a_seed_means_the_same_for_ever() -> None:
    assert make_generator(7, 1).initial_seed() == 2174948161648732372


def test_without_a_generator_the_global_one_is_used() -> None:
    logits = noise(0)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        one = stream(logits, SamplerRow(SamplingParams()), 20)
        torch.manual_seed(5)
        assert stream(logits, SamplerRow(SamplingParams()), 20) == one


def test_tokens_come_as_often_as_they_are_likely() -> None:
    counts = drawn([0.5, 0.25, 0.0, 0.15, 0.1], count=4000)
    for token_id, probability in enumerate([0.5, 0.25, 0.0, 0.15, 0.1]):
        assert counts[token_id] / 4000 == pytest.approx(probability, abs=0.03)
    assert counts[2] == 0


def test_temperature_sharpens_and_flattens() -> None:
    sharp, flat = (drawn([0.6, 0.4], 4000, temperature=each)[0] / 4000 for each in (0.5, 100))
    assert sharp == pytest.approx(36 / 52, abs=0.03)
    assert flat == pytest.approx(0.5, abs=0.03)
    # Subnormal: neither infinities nor NaN come out.
    assert drawn([0.1, 0.5, 0.4], temperature=5e-324, count=50) == {1: 50}


def test_top_k_keeps_k_and_ties_go_to_the_lowest_id() -> None:
    assert set(drawn([0.1, 0.3, 0.2, 0.4], top_k=2)) == {1, 3}
    assert set(drawn([0.25] * 4, top_k=2)) == {0, 1}
    for off in (0, -1, 4, 99):
        assert set(drawn([0.25] * 4, top_k=off)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.39, {3}), (0.41, {1, 3}), (0.71, {1, 2, 3}), (0.99, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_that_hold_it(top_p: float, kept: set[int]) -> None:
    assert set(drawn([0.1, 0.3, 0.2, 0.4], top_p=top_p)) == kept


def test_top_p_counts_what_top_k_left() -> None:
    # 0.4 is 57 % of what two leave: alone it holds 0.5, but not 0.6.
    assert set(drawn([0.1, 0.3, 0.2, 0.4], top_k=2, top_p=0.5)) == {3}
    assert set(drawn([0.1, 0.3, 0.2, 0.4], top_k=2, top_p=0.6)) == {1, 3}


@given(seed=st.integers(0, 10**6), top_p=st.floats(1e-6, 0.999999), scale=st.floats(0.01, 20))
@settings(deadline=None, max_examples=100)
def test_the_nucleus_is_the_one_a_full_sort_finds(seed: int, top_p: float, scale: float) -> None:
    weights = (torch.softmax(noise(seed)[0] * scale, 0).double() * 2**50).round().long()
    ranked = sorted(range(VOCAB), key=lambda token_id: (-int(weights[token_id]), token_id))
    expected, held = [], 0
    for token_id in ranked:
        if held >= top_p * int(weights.sum()):
            break
        expected.append(token_id)
        held += int(weights[token_id])
    assert nucleus(weights, top_p).tolist() == expected


def test_min_p_is_a_share_of_the_likeliest() -> None:
    assert set(drawn([0.05, 0.31, 0.2, 0.44], min_p=0.5)) == {1, 3}
    assert set(drawn([0.25, 0.35, 0.4], min_p=1.0)) == {2}


def test_repetition_penalty_makes_less_likely_on_either_side_of_zero() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2)
    up, down = torch.tensor([[3.0, 2.0]]), torch.tensor([[-2.0, -3.0]])
    for logits in (up, down):
        assert sample(logits, [SamplerRow(params)])[0].token_id == 0
        # In the prompt or in the output, once or often.
        for num_prompt in (0, 2):
            assert sample(logits, [SamplerRow(params, None, [0, 0], num_prompt)])[0].token_id == 1


def test_presence_counts_once_frequency_each_time_and_neither_the_prompt() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for name, prior, num_prompt, expected in (
        ("presence_penalty", [0], 0, 1),
        ("presence_penalty", [0], 1, 0),
        ("frequency_penalty", [0], 0, 1),
        ("frequency_penalty", [0, 0], 2, 0),
    ):
        params = SamplingParams(temperature=0, **{name: 1.5})
        assert sample(logits, [SamplerRow(params, None, prior, num_prompt)])[0].token_id == expected
    half = SamplingParams(temperature=0, frequency_penalty=0.6)
    assert sample(logits, [SamplerRow(half, None, [0])])[0].token_id == 0
    assert sample(logits, [SamplerRow(half, None, [0, 0])])[0].token_id == 1
    once = SamplingParams(temperature=0, presence_penalty=0.6)
    assert sample(logits, [SamplerRow(once, None, [0, 0])])[0].token_id == 0


def test_a_bias_is_added_before_penalties() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])

    def chosen(prior: list[int] | None = None, **wishes: Any) -> int:
        params = SamplingParams(temperature=0, **wishes)
        return sample(logits, [SamplerRow(GREEDY), SamplerRow(params, None, prior or [])])[
            1
        ].token_id

    logits = logits.repeat(2, 1)
    assert chosen(logit_bias={1: 0.9}) == 0
    assert chosen(logit_bias={1: 1.1}) == 1
    assert chosen(logit_bias={0: -100, 1: -100}) == 2
    # 3 times 0.5 is 1.5, less than 2; were the penalty first, 0.5 and 2 would make 2.5.
    assert chosen([1], logit_bias={1: 2}, repetition_penalty=2) == 0
    row = SamplerRow(SamplingParams(logit_bias={2: 100}), make_generator(1))
    assert stream(logits[:1], row, 50) == [2] * 50
    params = SamplingParams(temperature=0, logit_bias={2: 100}, logprobs=0)
    plain = SamplingParams(temperature=0, logprobs=3)
    biased, free = sample(logits, [SamplerRow(params), SamplerRow(plain)])
    assert biased.logprob == pytest.approx(dict(free.top)[2])


def test_banned_tokens_never_come() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert sample(logits, [SamplerRow(GREEDY, banned_ids=[0])])[0].token_id == 1
    row = SamplerRow(SamplingParams(), make_generator(1), banned_ids=[0, 1])
    assert stream(logits, row, 50) == [2] * 50


@pytest.mark.parametrize("temperature", [1e-300, 100.0, 1e38, 1e300])
def test_no_temperature_brings_back_what_is_banned(temperature: float) -> None:
    row = SamplerRow(SamplingParams(temperature=temperature), make_generator(1), banned_ids=[0, 1])
    found = {sample(torch.tensor([[9.0, 9.0, 1.0, 1.0]]), [row])[0].token_id for _ in range(40)}
    assert found == {2, 3}


def test_logprobs_are_of_the_model_alone() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0, repetition_penalty=9, logprobs=2)
    (found,) = sample(logits, [SamplerRow(params, None, [0])])
    total = math.log(math.e**2 + math.e + 1)
    assert (found.token_id, found.rank) == (1, 2)
    assert found.logprob == pytest.approx(1 - total)
    assert [token_id for token_id, _ in found.top] == [0, 1]
    assert [logprob for _, logprob in found.top] == pytest.approx([2 - total, 1 - total])


def test_logprobs_zero_is_of_the_chosen_only_and_more_than_all_is_all() -> None:
    (found,) = sample(torch.zeros(1, 4), [SamplerRow(SamplingParams(temperature=0, logprobs=0))])
    assert (found.top, found.rank) == ([], 1)
    assert found.logprob == pytest.approx(math.log(0.25))
    (found,) = sample(torch.zeros(1, 4), [SamplerRow(SamplingParams(temperature=0, logprobs=20))])
    assert [token_id for token_id, _ in found.top] == [0, 1, 2, 3]


def test_half_precision_is_sampled_in_full() -> None:
    logits = noise(0).to(torch.bfloat16)
    params = SamplingParams(logprobs=1)
    one = sample(logits, [SamplerRow(params, make_generator(1))])
    assert one == sample(logits.float(), [SamplerRow(params, make_generator(1))])


def test_nothing_in_nothing_out() -> None:
    assert sample(torch.zeros(0, 4), []) == []


@pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 1, 4)])
def test_logits_must_be_a_row_each(shape: tuple[int, ...]) -> None:
    with pytest.raises(BookError, match="for 1 row: expected"):
        sample(torch.zeros(shape), [SamplerRow(GREEDY)])


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=5, top_p=0.5),
        SamplingParams(min_p=0.1, repetition_penalty=100),
    ],
)
def test_broken_logits_never_give_a_token_that_does_not_exist(
    value: float, params: SamplingParams
) -> None:
    for broken in (torch.full((1, 100), value), torch.zeros(1, 100).index_fill(1, IDS, value)):
        (sampled,) = sample(broken, [SamplerRow(params, make_generator(1), [3, 4], 2)])
        assert 0 <= sampled.token_id < 100


IDS = torch.tensor([0, 3, 50])


@given(seed=st.integers(0, 10**6), count=st.integers(0, 20))
@settings(deadline=None, max_examples=30)
def test_logprobs_that_a_gpu_sorts_without_waiting_are_those_of_a_cpu(
    seed: int, count: int
) -> None:
    from penstock.engine import sampler

    logits = noise(seed, rows=2).round(decimals=1)  # with ties
    rows = [SamplerRow(SamplingParams(temperature=0, logprobs=count))] * 2
    waited = sample(logits, rows)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sampler, "_is_queued", lambda _: True)
        assert sample(logits, rows) == waited


@pytest.mark.parametrize("num_at_once", [1, 2, 3, 100])
def test_rows_chosen_together_are_not_mixed_up(
    num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.sampler._num_at_once", lambda _: num_at_once)
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {7: 100}},
        {"temperature": 0.6, "top_p": 0.9},
        {"top_k": 1, "presence_penalty": 2.0},
        {"temperature": 0, "logit_bias": {8: 100}, "logprobs": 1},
        {"min_p": 1.0},
    ]
    # The likeliest token of each row is far ahead.
    logits = noise(4, rows=len(wishes)) + 80 * torch.eye(VOCAB)[10 : 10 + len(wishes)]
    rows = [SamplerRow(SamplingParams(**each), make_generator(1)) for each in wishes]
    found = [each.token_id for each in sample(logits, rows)]
    assert found == [10, 11, 7, 13, 14, 8, 16]


@st.composite
def weights_and_wishes(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of weights as `weigh` makes them, with ties, zeros and extremes; how to pick of each."""
    size = draw(st.integers(2, 40))
    num_rows = draw(st.integers(1, 2))
    some = st.sampled_from([0, 0, 1, 2, 3, 7, 2**20, 2**43, 2**44])
    weight = some if draw(st.booleans()) else st.integers(0, 2**44)
    rows = [draw(st.lists(weight, min_size=size, max_size=size)) for _ in range(num_rows)]
    for row in rows:
        row[draw(st.integers(0, size - 1))] = 2**44
    share = st.one_of(st.floats(1e-9, 1.0), st.sampled_from([1.0, 1 - 2**-53, 0.5]))
    almost_one = st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53))
    wishes = [
        [draw(st.one_of(st.integers(1, size), st.just(size))), draw(share), draw(almost_one)]
        for _ in rows
    ]
    return torch.tensor(rows), torch.tensor(wishes, dtype=torch.float64)


@given(weights_and_wishes())
@settings(deadline=None, max_examples=1000 if torch.cuda.is_available() else 25)
def test_a_gpu_picks_what_a_cpu_picks(given: tuple[torch.Tensor, torch.Tensor]) -> None:
    pytest.importorskip("triton")
    from penstock.engine.drawing_triton import pick_rows

    weights, wishes = given
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    picked = pick_rows(weights.to(device), *wishes.to(device).unbind(1))
    expected = [int(pick(*row)) for row in zip(weights, *wishes.unbind(1), strict=True)]
    assert picked.tolist() == expected
    assert all(weights[row, token] > 0 for row, token in enumerate(expected))


@pytest.mark.parametrize(
    ("size", "top_p"),
    [
        (9_000, 0.9),
        pytest.param(128_257, 1.0, marks=ON_GPU),
        pytest.param(262_144, 0.999, marks=ON_GPU),
    ],
)
def test_a_gpu_picks_of_a_large_vocabulary(size: int, top_p: float) -> None:
    pytest.importorskip("triton")
    from penstock.engine.drawing import weigh
    from penstock.engine.drawing_triton import pick_rows

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores = torch.randn(4, size, generator=torch.Generator().manual_seed(3)) * 2
    weights = weigh(scores, torch.tensor([1.0, 0.6, 2.0, 1e4]))  # the last: all about the same
    wishes = torch.tensor(
        [[size, top_p, 0.3], [50, top_p, 0.999], [1000, top_p, 0.0], [size, top_p, 0.5]],
        dtype=torch.float64,
    )
    picked = pick_rows(weights.to(device), *wishes.to(device).unbind(1))
    expected = [int(pick(*row)) for row in zip(weights, *wishes.unbind(1), strict=True)]
    assert picked.tolist() == expected


@ON_GPU
def test_on_a_gpu_a_row_does_not_see_its_batch() -> None:
    logits = torch.randn(70, 128_257, device="cuda") * 4
    wishes = [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"top_k": 50},
        {"temperature": 0},
        {"temperature": 0, "presence_penalty": 1.0},
        {"min_p": 0.01, "logit_bias": {5: 3.0}},
        {"top_p": 0.5, "logprobs": 3},
    ]

    def rows(indices: range) -> list[SamplerRow]:
        return [
            SamplerRow(SamplingParams(**wishes[i % 7]), make_generator(i), [1, 2, 3], 1)
            for i in indices
        ]

    together = sample(logits, rows(range(70)))
    alone = [sample(logits[i : i + 1], rows(range(i, i + 1)))[0] for i in range(70)]
    assert together == alone
