"""How many leading pages can be used, compared with trying every length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.sglang.hits import PoolPresence, leading, usable

PRESENT = st.lists(st.booleans(), min_size=0, max_size=9)


def serves(pool: PoolPresence, length: int) -> bool:
    if length > len(pool.present):
        return False
    first = 0 if pool.num_trailing is None else max(0, length - pool.num_trailing)
    return all(pool.present[first:length])


@given(PRESENT, st.lists(st.tuples(PRESENT, st.none() | st.integers(1, 4)), max_size=3))
def test_every_length_that_all_pools_serve_and_no_other(
    main: list[bool], others: list[tuple[list[bool], int | None]]
) -> None:
    first = PoolPresence("kv", main)
    pools = [PoolPresence(f"pool {n}", *each) for n, each in enumerate(others)]
    hits = usable(first, pools)
    lengths = [
        length
        for length in range(1, len(main) + 1)
        if all(serves(pool, length) for pool in (first, *pools))
    ]
    assert hits.lengths == lengths
    assert hits.num_pages == max(lengths, default=0)
    assert hits.by_pool.get("kv", 0) == leading(main)
    for pool in pools:
        own = [n for n in range(1, leading(main) + 1) if serves(pool, n)]
        assert hits.by_pool.get(pool.name, 0) == max(own, default=0)


def test_a_state_is_of_use_only_where_it_is() -> None:
    hits = usable(
        PoolPresence("kv", [True] * 6), [PoolPresence("state", [False, True, False, True], 1)]
    )
    assert (hits.num_pages, hits.lengths) == (4, [2, 4])
