"""Fleets: one instance plays as alone, and sharing only ever helps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.costs.rates import LinkRate, PrefillRate
from penstock.errors import ConfigError
from penstock.sim.compute import ComputeRates, DecodeRate
from penstock.sim.fleet import FleetConfig, Roles, simulate_fleet
from penstock.sim.fleet_tally import FleetSimulated
from penstock.sim.formats import read_trace
from penstock.sim.instance import InstanceConfig
from penstock.sim.links import LinkSpec
from penstock.sim.routers import ROUTERS, RoutedPrompt
from penstock.sim.settings import SimulatedHardware
from penstock.sim.shared_store import SharedStore
from penstock.sim.simulator import simulate
from penstock.sim.trace import Trace, TraceRequest
from penstock.sim.workloads import generate
from penstock.types import BlockKey, Direction, Tier

RATES = ComputeRates(PrefillRate(10_000.0), DecodeRate(0.01, 0.0001, 1e-7))
MB = 1_000_000
LINK = LinkSpec(LinkRate(1000 * MB), LinkRate(1000 * MB))
CONFIG = InstanceConfig(
    64, MB, RATES, 128, 256, 2048, "lru", LINK, LINK, 512, 16, 1000, remote_link=LINK
)
TRACES = Path(os.environ.get("PENSTOCK_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


def key(*name: object) -> BlockKey:
    return BlockKey(str(name).encode().ljust(32, b".")[:32])


def turns(num_sessions: int, num_turns: int, pause: float = 10.0) -> Trace:
    """Sessions that take turns. Each turn is 4 blocks longer than the one before."""
    requests = [
        TraceRequest(
            turn * pause + session * pause / num_sessions,
            64 * 4 * (turn + 1) + 5,
            5,
            tuple(key(session, block) for block in range(4 * (turn + 1))),
            session=f"session {session}",
        )
        for turn in range(num_turns)
        for session in range(num_sessions)
    ]
    return Trace("turns", 64, tuple(requests))


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", num_requests=200, seed=3, block_tokens=64)


def check_sums(found: FleetSimulated, trace: Trace) -> None:
    total = found.total
    assert sum(each.num_requests for each in found.instances) == len(trace.requests)
    assert sum(each.num_hits for each in found.instances) == sum(total.hits.values())
    assert sum(each.num_blocks for each in found.instances) == total.num_blocks
    assert sum(each.busy_seconds for each in found.instances) == pytest.approx(total.busy_seconds)
    assert total.num_served + total.num_refused == len(trace.requests)
    for told in total.requests:
        if not told.refusal:
            assert told.first_token_seconds is not None
            assert told.seconds is not None
            assert 0 < told.first_token_seconds <= told.seconds


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("workload", "speed", "options"),
    [
        ("chat", 1.0, {}),
        ("chat", 20.0, {"policy": "s3fifo", "num_disk_blocks": 0}),
        ("rag", 3.0, {"policy": "reuse"}),
        ("code", 1.0, {"num_host_blocks": 0, "num_disk_blocks": 0}),
        ("batch", 50.0, {"max_waiting": 20, "num_device_blocks": 64}),
    ],
)
def test_one_instance_is_the_simulator_bit_for_bit(
    router: str, workload: str, speed: float, options: dict[str, object]
) -> None:
    trace = generate(workload, num_requests=150, seed=5, block_tokens=64)
    config = replace(CONFIG, **options)  # type: ignore[arg-type]
    alone = simulate(trace, config, speed=speed)
    found = simulate_fleet(trace, FleetConfig(config, 1, router), speed=speed)
    assert found.total == alone
    check_sums(found, trace)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("num_per_node", "num_remote"), [(1, 0), (2, 0), (4, 0), (1, 5000)])
def test_requests_and_hits_add_up(
    chat: Trace, router: str, num_per_node: int, num_remote: int
) -> None:
    config = replace(CONFIG, num_remote_blocks=num_remote)
    fleet = FleetConfig(config, 4, router, num_per_node)
    found = simulate_fleet(chat, fleet, speed=4.0)
    check_sums(found, chat)
    assert found == simulate_fleet(chat, fleet, speed=4.0)
    assert 0 < found.token_hit_rate < 1
    assert found.balance >= 1
    moved = [found.network_bytes(direction) for direction in Direction]
    assert all(moved) if num_remote else not any(moved)


def test_more_sharing_never_lowers_the_hit_rate() -> None:
    """Five sessions in turn on four instances: no session meets its own instance again."""
    trace = turns(num_sessions=5, num_turns=4)
    config = replace(CONFIG, num_host_blocks=1000, num_disk_blocks=0)
    shared = replace(config, num_remote_blocks=1000)
    rates = [
        simulate_fleet(trace, fleet).total.hit_rate
        for fleet in (
            FleetConfig(config, 4),
            FleetConfig(config, 4, num_per_node=2),
            FleetConfig(config, 4, num_per_node=4),
            FleetConfig(shared, 4),
            FleetConfig(config, 4, "sticky"),
        )
    ]
    assert rates == sorted(rates)
    # All that a session was sent before: 4, 8 and 12 of 4 + 8 + 12 + 16 blocks.
    assert rates[2:] == [24 / 40] * 3
    assert rates[0] < rates[1] < rates[2]


def test_what_one_node_wrote_the_others_find() -> None:
    trace = turns(num_sessions=1, num_turns=2)
    config = replace(CONFIG, num_disk_blocks=0, num_remote_blocks=100)
    found = simulate_fleet(trace, FleetConfig(config, 2))
    assert found.total.hits[Tier.REMOTE] == 4
    assert found.network_bytes(Direction.LOAD) == 4 * MB
    assert found.network_bytes(Direction.SAVE) == 8 * MB  # what is there is not written again
    assert found.num_store_evicted == 0


def test_a_small_store_evicts_and_loses_nothing_but_hits() -> None:
    trace = turns(num_sessions=3, num_turns=5)
    config = replace(CONFIG, num_disk_blocks=0)
    large = simulate_fleet(trace, FleetConfig(replace(config, num_remote_blocks=500), 2))
    small = simulate_fleet(trace, FleetConfig(replace(config, num_remote_blocks=10), 2))
    check_sums(small, trace)
    assert small.num_store_evicted > 0
    assert small.total.num_served == len(trace.requests)
    assert small.total.hit_rate < large.total.hit_rate


def test_instances_of_a_node_have_their_own_devices() -> None:
    """Two requests at once: each computes on its own device, at the time that one alone takes."""
    blocks = tuple(key("a", block) for block in range(6))
    others = tuple(key("b", block) for block in range(6))
    both = Trace(
        "two",
        64,
        (TraceRequest(0.0, 64 * 6, 20, blocks), TraceRequest(0.0, 64 * 6, 20, others)),
    )
    alone = simulate(replace(both, requests=both.requests[:1]), CONFIG).first_token_seconds[0]
    for num_per_node in (1, 2):
        found = simulate_fleet(both, FleetConfig(CONFIG, 2, num_per_node=num_per_node))
        assert found.total.first_token_seconds == pytest.approx((alone, alone))
        assert found.balance == pytest.approx(1.0)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("num_per_node", "num_remote"), [(4, 0), (2, 5000), (1, 5000)])
def test_prefill_apart_from_decode(router: str, num_per_node: int, num_remote: int) -> None:
    trace = turns(num_sessions=6, num_turns=4, pause=3.0)
    config = replace(CONFIG, num_host_blocks=2000, num_disk_blocks=0, num_remote_blocks=num_remote)
    apart = FleetConfig(config, 4, router, num_per_node, Roles(2, 2))
    found = simulate_fleet(trace, apart)
    check_sums(found, trace)
    # Decoders find all full blocks of the prompts, and compute the 5 tokens after them.
    assert found.num_handed_blocks == found.total.num_blocks
    assert found.num_unhanded_blocks == 0
    assert found.total.num_output_tokens == 5 * len(trace.requests)
    # Hits are those of prefillers: what decoders take over is none.
    assert found.total.hit_rate <= 24 / 40
    roles = [each.num_requests > 0 for each in found.instances if not each.is_decoder]
    assert any(roles)
    assert not any(each.num_requests for each in found.instances if not each.is_prefiller)


def test_prompts_do_not_slow_decoders_that_are_apart() -> None:
    """Long answers, and long prompts that arrive meanwhile."""
    requests = [
        TraceRequest(0.3 * n, 64 * 40, 150, tuple(key(n, block) for block in range(40)))
        for n in range(24)
    ]
    trace = Trace("bursts", 64, tuple(requests))
    config = replace(CONFIG, num_device_blocks=2000, num_host_blocks=4000, num_disk_blocks=0)
    mixed = simulate_fleet(trace, FleetConfig(config, 4, num_per_node=4))
    apart = simulate_fleet(trace, FleetConfig(config, 4, num_per_node=4, roles=Roles(2, 2)))
    assert mixed.lost_decode_share > 0.05
    assert apart.lost_decode_share < mixed.lost_decode_share / 5


def test_clients_that_wait_for_their_answers() -> None:
    trace = turns(num_sessions=4, num_turns=3, pause=0.001)
    found = simulate_fleet(trace, FleetConfig(CONFIG, 2, "sticky", num_clients=1))
    check_sums(found, trace)
    # One at a time: all that was computed before is found, and nobody waits.
    assert found.total.hit_rate == pytest.approx((4 + 8) / (4 + 8 + 12))
    assert found.total.seconds == pytest.approx(
        sum(each.seconds for each in found.total.requests if each.seconds), rel=1e-6
    )
    # With one client, loads are always even, and new sessions go to the first instance.
    first = simulate_fleet(trace, FleetConfig(CONFIG, 2, "cache-aware", num_clients=1))
    assert [each.num_requests for each in first.instances] == [12, 0]


def test_a_router_of_ones_own() -> None:
    class Last:
        def route(self, prompt: RoutedPrompt, loads: Sequence[int], now: float) -> int:
            return len(loads) - 1

    trace = turns(num_sessions=4, num_turns=3, pause=0.001)
    found = simulate_fleet(trace, FleetConfig(CONFIG, 3, num_clients=2), router=Last())
    check_sums(found, trace)
    assert [each.num_requests for each in found.instances] == [0, 0, 12]


def test_the_shared_store_evicts_what_was_unused_longest() -> None:
    store = SharedStore(2)
    store.put([key(1), key(2)])
    assert store.use(key(1))
    store.put([key(3)])
    assert key(2) not in store
    assert (key(1) in store, len(store), store.num_evicted) == (True, 2, 1)
    assert not store.use(key(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_instances": 0}, "number of instances is 0: expected 1 or more"),
        ({"num_per_node": 0}, "instances per node is 0"),
        ({"num_per_node": 3}, "4 instances do not fill nodes of 3"),
        ({"num_clients": 0}, "number of clients is 0"),
        ({"router": "best"}, "no router 'best'"),
        ({"roles": Roles(2, 1)}, "prefill=2,decode=1 add up to 3, but the fleet has 4 instances"),
        ({"roles": Roles(4, 0)}, "expected at least 1 of each"),
        ({"roles": Roles(2, 2)}, "on 4 nodes, but there is no shared store"),
        (
            {
                "roles": Roles(2, 2),
                "instance": replace(CONFIG, num_host_blocks=0, num_disk_blocks=0),
            },
            "there is no host tier",
        ),
    ],
)
def test_fleets_that_cannot_be(options: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"instance": CONFIG, "num_instances": 4} | options
    with pytest.raises(ConfigError, match=message):
        FleetConfig(**given)  # type: ignore[arg-type]


def test_the_conversation_trace() -> None:
    """A part of the real trace: routers that know sessions have more hits than turns."""
    path = TRACES / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    whole = read_trace(path)
    trace = replace(whole, requests=whole.requests[:1500])
    instance = SimulatedHardware("llama-3.1-8b", "h200").instance(512, "reuse", 640, 1337, 0)
    rates = {}
    for router in ROUTERS:
        found = simulate_fleet(trace, FleetConfig(instance, 16, router))
        check_sums(found, trace)
        rates[router] = found.token_hit_rate
    assert rates["round-robin"] < rates["cache-aware"]
    assert rates["round-robin"] < rates["sticky"]
