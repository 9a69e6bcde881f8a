"""The engine behind an event loop, with the small random model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import BLOCK_BYTES, BLOCK_TOKENS

from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.admission import Busy, TooLong
from penstock.engine.detokenize import Detokenizer
from penstock.engine.engine import Engine, Progress
from penstock.engine.faults import EngineFault, EngineLost
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.service import Delta, Service, Stopped, Stream
from penstock.errors import ConfigError, PenstockError

PROMPT = list(range(100, 150))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=700, ignore_eos=True)

Services = Callable[..., Service]


@pytest.fixture
def make(loaded: LoadedModel) -> Services:
    def build(num_blocks: int = 256, tiers: Config | None = None, max_waiting: int = 64) -> Service:
        settings = EngineConfig(
            num_blocks * BLOCK_BYTES, BLOCK_TOKENS, max_num_seqs=4, max_waiting=max_waiting
        )
        return Service(Engine(loaded, settings, tiers))

    return build


@pytest.fixture
def alone(loaded: LoadedModel) -> Iterator[list[int]]:
    """What the engine itself says."""
    engine = Engine(loaded, EngineConfig(256 * BLOCK_BYTES, BLOCK_TOKENS))
    request = engine.add("alone", PROMPT, GREEDY)
    while engine.has_work:
        engine.step()
    yield request.output_ids
    engine.close()


@asynccontextmanager
async def closing(service: Service) -> AsyncIterator[Service]:
    try:
        yield service
    finally:
        await service.close(grace_seconds=0)


async def collect(service: Service, params: SamplingParams = GREEDY) -> list[Delta]:
    async with await service.submit(PROMPT, params) as stream:
        return [delta async for delta in stream]


async def to_the_end(stream: Stream) -> None:
    async for _ in stream:
        pass


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        await asyncio.sleep(0.005)


def run(main: Awaitable[None]) -> None:
    async def outer() -> None:
        await main

    asyncio.run(outer())


def test_many_at_once_each_get_their_own_tokens(make: Services, alone: list[int]) -> None:
    async def main() -> None:
        async with closing(make()) as service:
            for deltas in await asyncio.gather(*(collect(service) for _ in range(10))):
                assert [delta.sampled.token_id for delta in deltas] == alone
                assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]

    run(main())


def test_the_n_of_a_request_come_on_one_stream(make: Services) -> None:
    async def main() -> None:
        async with closing(make()) as service:
            params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
            first, again = await collect(service, params), await collect(service, params)
            by_index = [[d.sampled.token_id for d in first if d.index == i] for i in range(3)]
            assert [len(tokens) for tokens in by_index] == [8, 8, 8]
            assert len({tuple(tokens) for tokens in by_index}) == 3
            assert [
                [d.sampled.token_id for d in again if d.index == i] for i in range(3)
            ] == by_index

    run(main())


def test_a_stream_that_is_left_frees_its_blocks(make: Services, alone: list[int]) -> None:
    async def main() -> None:
        async with closing(make()) as service:
            pool = service.engine.pool
            async with await service.submit(PROMPT, ENDLESS) as stream:
                async for _ in stream:
                    break
            await until(lambda: pool.num_available == pool.num_blocks)
            cancelled = asyncio.create_task(collect(service, ENDLESS))
            await until(lambda: pool.num_available < pool.num_blocks)
            cancelled.cancel()
            await until(lambda: pool.num_available == pool.num_blocks)
            assert [d.sampled.token_id for d in await collect(service)] == alone

    run(main())


def test_refusals_come_before_the_stream(make: Services) -> None:
    async def main() -> None:
        async with closing(make(8, max_waiting=2)) as service:
            with pytest.raises(TooLong):
                await service.submit(list(range(1, 200)), GREEDY)
            with pytest.raises(ConfigError, match="empty"):
                await service.submit([], GREEDY)
            with pytest.raises(ConfigError, match="token ids from"):
                await service.submit([10**9], GREEDY)
            streams = []

            async def crowd() -> None:
                for _ in range(50):
                    streams.append(await service.submit(PROMPT, GREEDY))

            with pytest.raises(Busy) as refusal:
                await crowd()
            assert refusal.value.retry_after_seconds >= 1
            for stream in streams:
                assert [delta async for delta in stream][-1].finish_reason == "length"

    run(main())


def test_of_n_sequences_all_are_accepted_or_none(make: Services) -> None:
    async def main() -> None:
        async with closing(make(8, max_waiting=2)) as service:
            params = SamplingParams(n=3, temperature=1.0, max_tokens=4)
            with pytest.raises(Busy):
                await service.submit(PROMPT, params)
            assert service.engine.scheduler.num_waiting == 0

    run(main())


def test_closing_finishes_what_there_is(make: Services, alone: list[int]) -> None:
    async def main() -> None:
        service = make()
        stream = await service.submit(PROMPT, GREEDY)
        closed = asyncio.create_task(service.close(grace_seconds=60))
        await asyncio.sleep(0)
        with pytest.raises(Stopped):
            await service.submit(PROMPT, GREEDY)
        assert [delta.sampled.token_id async for delta in stream] == alone
        await closed

    run(main())


def test_closing_without_grace_ends_the_streams(make: Services) -> None:
    async def main() -> None:
        service = make()
        stream = await service.submit(PROMPT, ENDLESS)
        await stream.__anext__()
        await service.close(grace_seconds=0)
        with pytest.raises(Stopped, match="send the request again"):
            async for _ in stream:
                pass
        with pytest.raises(Stopped):
            await service.submit(PROMPT, GREEDY)
        await service.close()

    run(main())


def test_an_engine_that_fails_tells_everyone(
    make: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        service = make()
        stream = await service.submit(PROMPT, ENDLESS)
        await stream.__anext__()

        def broken(*_: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(service.engine, "step", broken)
        with pytest.raises(Stopped):
            async for _ in stream:
                pass
        await until(lambda: service.failure is not None)
        with pytest.raises(Stopped):
            await service.submit(PROMPT, GREEDY)
        await service.close()

    run(main())


def test_who_had_finished_when_the_engine_failed_has_the_whole_answer(
    make: Services, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        service = make()
        step, finished = service.engine.step, False

        def breaks(meanwhile: Callable[[], None]) -> list[Progress]:
            nonlocal finished
            if finished:
                raise RuntimeError("the device is gone")
            done = step(meanwhile)
            finished = any(progress.request.finish_reason for progress in done)
            return done

        monkeypatch.setattr(service.engine, "step", breaks)
        deltas = await collect(service)
        assert [delta.sampled.token_id for delta in deltas] == alone
        assert deltas[-1].finish_reason == "length"
        await until(lambda: service.failure is not None)
        await service.close()

    run(main())


def test_a_step_that_fails_ends_its_streams_and_the_next_is_served(
    make: Services, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with closing(make()) as service:
            three = replace(ENDLESS, n=3)
            stream = await service.submit(PROMPT, three)
            await stream.__anext__()
            run = service.engine.runner.run

            def breaks(*given: object) -> None:
                monkeypatch.setattr(service.engine.runner, "run", run)
                raise RuntimeError("injected")

            monkeypatch.setattr(service.engine.runner, "run", breaks)
            with pytest.raises(EngineFault, match="Retry the request"):
                async for _ in stream:
                    pass
            for _ in range(2):
                deltas = await collect(service)
                assert [delta.sampled.token_id for delta in deltas] == alone
            assert service.failure is None
            pool = service.engine.pool
            await until(lambda: pool.num_available == pool.num_blocks)

    run(main())


def test_an_engine_that_is_lost_while_clients_leave_and_come_tells_everyone(
    make: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of it meanwhile meets books that are half made."""

    async def main() -> None:
        service = make()
        streams = [await service.submit(PROMPT, ENDLESS) for _ in range(8)]
        await streams[0].__anext__()
        scheduler_class = type(service.engine.scheduler)

        def gone(*_: object) -> None:
            service.abort(streams[7].request_ids)
            raise RuntimeError("the device is gone")

        def fails(*_: object) -> None:
            raise RuntimeError("the books are gone, too")

        monkeypatch.setattr(scheduler_class, "remove", fails)
        monkeypatch.setattr(type(service.engine.runner), "run", gone)
        for stream in streams[:7]:
            with pytest.raises(PenstockError):
                await asyncio.wait_for(to_the_end(stream), 60)
        await asyncio.wait_for(asyncio.wrap_future(service.ended), 60)
        assert isinstance(service.failure, EngineLost)
        await service.close()

    run(main())


def test_a_text_that_cannot_be_made_ends_its_own_stream_alone(
    make: Services, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Detokenizer.append
    broken: list[Detokenizer] = []

    def breaks(self: Detokenizer, token_id: int) -> str:
        if self in broken:
            raise RuntimeError("injected")
        return append(self, token_id)

    async def main() -> None:
        async with closing(make()) as service:
            monkeypatch.setattr(Detokenizer, "append", breaks)
            stream = await service.submit(PROMPT, ENDLESS)
            await stream.__anext__()
            beside = asyncio.create_task(collect(service))
            broken.append(service.engine._live[stream.request_ids[0]].detokenizer)
            with pytest.raises(EngineFault):
                async for _ in stream:
                    pass
            assert [delta.sampled.token_id for delta in await beside] == alone
            pool = service.engine.pool
            await until(lambda: pool.num_available == pool.num_blocks)

    run(main())


@pytest.mark.parametrize(
    ("prompt", "given", "options"),
    [
        ([1.5], {}, {}),
        (["a"], {}, {}),
        ([-1], {}, {}),
        ([2**70], {}, {}),
        ([True, None], {}, {}),
        ([1], {"min_tokens": 1, "stop_token_ids": [2_000_000_000]}, {}),
        ([1], {"stop_token_ids": [2**70]}, {}),
        ([1], {}, {"priority": 0.5}),
        ([1], {}, {"priority": float("nan")}),
        ([1], {}, {"tenant": "half a pair \ud800"}),
        ([1], {}, {"tenant": None}),
    ],
    ids=str,
)
def test_what_the_model_cannot_serve_never_reaches_its_thread(
    make: Services, prompt: Any, given: dict[str, Any], options: dict[str, Any]
) -> None:
    async def main() -> None:
        async with closing(make()) as service:
            queued: list[Any] = []
            service._queue = queued.append  # type: ignore[method-assign]
            with pytest.raises(ConfigError, match="expected"):
                await service.submit(prompt, SamplingParams(max_tokens=2, **given), **options)
            assert queued == []

    run(main())


def test_saves_reach_the_disk_while_nothing_is_asked(make: Services, tmp_path: Path) -> None:
    tiers = Config(
        HostConfig(size_bytes=64 * BLOCK_BYTES, huge_pages=False),
        DiskConfig(path=str(tmp_path / "kv"), size_bytes=256 * BLOCK_BYTES),
    )

    async def main() -> None:
        async with closing(make(64, tiers)) as service:
            await collect(service)
            await until(lambda: not service.engine.is_moving)
        async with closing(make(64, tiers)) as service:
            await until(lambda: not service.engine.is_moving)  # the index is read
            deltas = await collect(service)
            assert deltas[-1].num_cached_tokens == 48

    run(main())
