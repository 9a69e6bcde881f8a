"""The simulated fleet and a real one, behind the real router, find the same share of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from server.running import Local
from tiny import always_load
from transformers import AutoTokenizer

from benchmarks.router_agreement import (
    AIM,
    MODEL,
    POLICIES,
    Compared,
    Sizes,
    compare,
    fingerprint,
    prompt_text,
    real_router,
    replay,
    save_model,
    shrink,
    single_token_words,
)
from penstock.config import Config, HostConfig
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import BlockKey
from servers import is_skipped
from servers.vllm_router import WHY_NOT

pytestmark = pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))

# A server holds part of what it is sent in turn, and room for the longest request.
SMALL = Sizes(num_servers=2, num_clients=1, num_device_blocks=32, num_host_blocks=64)
ROOMY = Sizes(num_servers=2, num_clients=1, num_device_blocks=32, num_host_blocks=512)
NUM_SESSIONS = 10
NUM_TURNS = 4


def key(*names: object) -> BlockKey:
    return BlockKey(repr(names).encode().ljust(32, b".")[:32])


def conversations() -> Trace:
    """Ten that begin alike and grow by two to four blocks of 512 tokens, in turns."""
    requests = []
    for turn in range(NUM_TURNS):
        # In another order each time, so that a session's turns do not all have the same parity.
        for place in range(NUM_SESSIONS):
            session = (place * (1, 3, 7, 9)[turn] + turn // 2) % NUM_SESSIONS
            blocks = 2 + (turn + 1) * (2 + session % 3)
            keys = [key("system"), *(key(session, block) for block in range(1, blocks))]
            # The last one is incomplete, and the next turn has another in its place.
            keys[-1] = key(session, turn, "last")
            num_tokens = 512 * blocks - 100 - 7 * session
            requests.append(TraceRequest(float(len(requests)), num_tokens, 300, tuple(keys)))
    return Trace("conversations", 512, tuple(requests))


class Fleet(NamedTuple):
    servers: list[Local]
    fingerprints: list[str]
    words: list[str]
    block_bytes: int


@pytest.fixture(scope="module")
def start(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Fleet]]:
    """Starts servers with weights of their own; each is stopped at the end."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny)
    with ExitStack() as stack:

        def make(sizes: Sizes) -> Fleet:
            servers = []
            for number in range(sizes.num_servers):
                model = tmp_path_factory.mktemp("model")
                block_bytes = sizes.block_tokens * save_model(model, tokenizer, number)
                host_bytes = sizes.num_host_blocks * block_bytes
                server = Local(
                    model,
                    Config(HostConfig(size_bytes=host_bytes, policy="lru")),
                    names=(MODEL,),
                    cold_kv=False,
                    **sizes.server_options(block_bytes),
                ).start()
                stack.callback(server.stop)
                assert server.serving is not None
                engine = server.serving.service.engine
                assert engine.pool.num_blocks == sizes.num_device_blocks
                assert engine.offloader is not None
                assert engine.offloader.num_host_blocks == sizes.num_host_blocks
                always_load(engine)
                servers.append(server)
            names = [fingerprint(server.url) for server in servers]
            return Fleet(servers, names, single_token_words(tokenizer), block_bytes)

        yield make


@pytest.fixture(scope="module")
def small(start: Callable[..., Fleet]) -> Fleet:
    return start(SMALL)


def play(fleet: Fleet, sizes: Sizes, policy: str, folder: Path) -> tuple[Compared, list[int]]:
    """What both found, and which server the real router chose for each request."""
    trace = shrink(conversations(), NUM_SESSIONS * NUM_TURNS, sizes.block_tokens)
    assert len(trace.requests) == NUM_SESSIONS * NUM_TURNS
    prompts = [prompt_text(r, fleet.words, sizes.block_tokens, policy) for r in trace.requests]
    urls = [server.url for server in fleet.servers]
    with real_router(folder, urls, policy) as url:
        answers = replay(url, trace, prompts, fleet.fingerprints, sizes.num_clients)
    compared = compare(trace, policy, sizes, fleet.block_bytes, answers)
    return compared, [answer.server for answer in answers]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_choices_find_the_same(small: Fleet, policy: str, tmp_path: Path) -> None:
    compared, choices = play(small, SMALL, policy, tmp_path)
    assert 0.1 < compared.real < 0.75, "some of it is found, and some was evicted"
    assert compared.same_routing == pytest.approx(compared.real, abs=AIM)
    if policy == "sticky":
        # Where sessions go depends on the ports of the servers, and so does what is evicted.
        sessions = [r.session for r in shrink(conversations(), 40, 16).requests]
        assert len(set(zip(sessions, choices, strict=True))) == NUM_SESSIONS
    else:
        assert compared.simulated == pytest.approx(compared.real, abs=AIM)
        assert sorted(compared.simulated_loads) == sorted(compared.real_loads)


def test_sessions_that_stay_find_all_that_they_left(
    start: Callable[..., Fleet], tmp_path: Path
) -> None:
    compared, _ = play(start(ROOMY), ROOMY, "sticky", tmp_path)
    assert compared.simulated == pytest.approx(compared.real, abs=AIM)
