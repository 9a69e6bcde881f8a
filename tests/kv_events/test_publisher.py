"""The publisher on real sockets: readers that come late, miss something, or are slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from kv_events.router import CPU, GPU, Router, SubscribedRouter
from kv_events.test_held import sequence

from penstock.config.options import EngineOptions
from penstock.errors import ConfigError
from penstock.kv_events.held import HeldBlocks, NamedSequence
from penstock.kv_events.publisher import KvEventPublisher
from penstock.types import Tier

LOOPBACK = "tcp://127.0.0.1:*"


@pytest.fixture
def publish() -> Iterator[Callable[..., KvEventPublisher]]:
    made: list[KvEventPublisher] = []

    def make(*args: str, **options: object) -> KvEventPublisher:
        made.append(KvEventPublisher(*(args or (LOOPBACK,)), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def subscribe() -> Iterator[Callable[..., SubscribedRouter]]:
    made: list[SubscribedRouter] = []

    def make(*args: str) -> SubscribedRouter:
        made.append(SubscribedRouter(*args))
        return made[-1]

    yield make
    for router in made:
        router.close()


def store(publisher: KvEventPublisher, prompt: NamedSequence, tier: Tier = Tier.DEVICE) -> None:
    publisher.held.name(prompt, range(len(prompt.keys)))
    publisher.held.stored(tier, prompt.keys)


def read_until(router: SubscribedRouter, is_so: Callable[[], bool]) -> None:
    while not is_so():
        router.wait()


def replay(publisher: KvEventPublisher, start: int) -> Router:
    """Ask for batches as vLLM's example does."""
    router = Router()
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        assert publisher.replay_endpoint is not None
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            assert socket.poll(60_000), "no answer"
            empty, _topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == b"\xff" * 8
                return router
            router.numbers.append(int.from_bytes(number, "big"))
            router.read(payload)
    finally:
        context.destroy(linger=0)


def test_readers_learn_what_is_held_whenever_they_come(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., SubscribedRouter]
) -> None:
    publisher = publish()
    prompt, later = sequence(list(range(40))), sequence(list(range(60, 80)))
    store(publisher, prompt)
    early = subscribe(publisher.endpoint)
    read_until(early, lambda: len(early.held[GPU]) == 10)
    assert early.events[0] == {"type": "AllBlocksCleared"}
    store(publisher, later, Tier.HOST)
    read_until(early, lambda: len(early.held[CPU]) == 5)
    publisher.held.removed(Tier.DEVICE, prompt.keys[5:])
    read_until(early, lambda: len(early.held[GPU]) == 5)

    late = subscribe(publisher.endpoint)
    read_until(late, lambda: len(late.held[GPU]) == 5 and len(late.held[CPU]) == 5)
    numbers = late.numbers[-1]
    read_until(early, lambda: early.numbers[-1] == numbers)
    assert early.held == late.held
    assert early.numbers == list(range(early.numbers[0], early.numbers[0] + len(early.numbers)))


def test_the_topic_is_the_one_asked_for(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., SubscribedRouter]
) -> None:
    publisher = publish(LOOPBACK, "kv@10.0.0.1:8000@tiny")
    store(publisher, sequence(list(range(8))))
    llm_d = subscribe(publisher.endpoint, "kv@")
    read_until(llm_d, lambda: len(llm_d.held[GPU]) == 2)
    assert llm_d.topics == {b"kv@10.0.0.1:8000@tiny"}


def test_a_restart_is_seen_as_one(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., SubscribedRouter]
) -> None:
    """The numbers go on rising, and what was held before is cleared."""
    publisher = publish()
    endpoint = publisher.endpoint
    router = subscribe(endpoint)
    store(publisher, sequence(list(range(8))))
    read_until(router, lambda: len(router.held[GPU]) == 2)
    publisher.close()
    read_until(router, lambda: not router.held[GPU])
    last = router.numbers[-1]
    store(publish(endpoint), sequence(list(range(8, 20))))
    read_until(router, lambda: len(router.held[GPU]) == 3)
    assert min(number for number in router.numbers if number > last) > last + 1


def test_replay(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., SubscribedRouter]
) -> None:
    publisher = publish(LOOPBACK, "", LOOPBACK)
    router = subscribe(publisher.endpoint)
    read_until(router, lambda: bool(router.events))
    for number in range(3):
        store(publisher, sequence(list(range(20 * number, 20 * number + 20))))
        read_until(router, lambda count=5 * number + 5: len(router.held[GPU]) == count)
    everything = replay(publisher, 0)
    assert everything.numbers == router.numbers
    assert everything.held == router.held
    half = replay(publisher, router.numbers[-1])
    assert half.numbers == router.numbers[-1:]
    assert replay(publisher, router.numbers[-1] + 1).numbers == []


def test_replay_of_batches_that_are_gone(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., SubscribedRouter]
) -> None:
    """Everything is published again, so that nobody is left with a gap."""
    publisher = publish(LOOPBACK, "", LOOPBACK, replay_bytes=500)
    router = subscribe(publisher.endpoint)
    read_until(router, lambda: bool(router.events))
    for number in range(8):
        store(publisher, sequence(list(range(20 * number, 20 * number + 20))))
        read_until(router, lambda count=5 * number + 5: len(router.held[GPU]) == count)
    last = router.numbers[-1]
    replay(publisher, 0)
    read_until(router, lambda: router.numbers[-1] > last and len(router.held[GPU]) == 40)
    assert router.events.count({"type": "AllBlocksCleared"}) == 2


def test_after_drops_everything_is_published_again(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., SubscribedRouter]
) -> None:
    publisher = publish(held=HeldBlocks(max_queued=20))
    router = subscribe(publisher.endpoint)
    read_until(router, lambda: bool(router.events))
    store(publisher, sequence(list(range(400))))  # 100 blocks at once
    read_until(router, lambda: len(router.held[GPU]) == 100)
    assert publisher.held.num_dropped >= 21


def test_without_a_reader_nothing_is_kept(publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish(LOOPBACK, "", LOOPBACK)
    store(publisher, sequence(list(range(400))))
    end = time.monotonic() + 60
    while publisher.held.take(1) is not None:  # until the publisher has dropped what waits
        assert time.monotonic() < end
    assert len(replay(publisher, 0).held[GPU]) == 100


def test_an_invalid_replay_request_is_ignored(
    publish: Callable[..., KvEventPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publish(LOOPBACK, "", LOOPBACK)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    socket.connect(publisher.replay_endpoint)
    socket.send_multipart((b"what", b"is", b"this"))
    socket.send_multipart((b"", bytes(8)))
    assert socket.poll(60_000)
    context.destroy(linger=0)
    assert "a replay request has 3 frames" in caplog.text


def test_an_address_in_use_is_an_error(publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish()
    with pytest.raises(ConfigError, match=r"kv_events is .*in use"):
        KvEventPublisher(publisher.endpoint)
    with pytest.raises(ConfigError, match=r"kv_events_replay is .*in use"):
        KvEventPublisher(LOOPBACK, "", publisher.endpoint)


def test_a_reader_may_listen_itself(publish: Callable[..., KvEventPublisher]) -> None:
    """As llm-d's indexer does, if it has one address for all servers."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe("")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    publish(f"tcp://localhost:{port}")
    assert socket.poll(60_000)
    router = Router()
    router.read(socket.recv_multipart()[2])
    assert router.events == [{"type": "AllBlocksCleared"}]
    context.destroy(linger=0)


@pytest.mark.parametrize("address", ["5557", "tcp://", "tcp://*", "http://host:1", "tcp://a b:1"])
def test_options_must_be_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_events is .*: expected a ZeroMQ address"):
        EngineOptions(kv_events=address)
    with pytest.raises(ConfigError, match=r"kv_events_replay is .*: expected a ZeroMQ address"):
        EngineOptions(kv_events=LOOPBACK, kv_events_replay=address)


def test_options_need_an_address() -> None:
    with pytest.raises(ConfigError, match=r"kv_events_topic is given without kv_events"):
        EngineOptions(kv_events_topic="kv@pod@model")
    with pytest.raises(ConfigError, match=r"kv_events_replay is given without kv_events"):
        EngineOptions(kv_events_replay=LOOPBACK)
