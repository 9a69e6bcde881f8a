from __future__ import annotations

import asyncio
from typing import Any

from tools import TIMEOUT_SECONDS

from penstock.server.watching import Watch, Watched
from penstock.watch.samples import Samples


def test_a_watch_ends_also_when_it_is_answered_in_that_moment() -> None:
    """Python 3.11's `wait_for` returns an answer that comes together with the cancellation."""

    async def run() -> None:
        asked: asyncio.Future[asyncio.Future[list[dict[str, Any]]]]
        asked = asyncio.get_running_loop().create_future()

        async def read() -> Samples:
            return Samples({})

        async def sessions() -> list[dict[str, Any]]:
            answer: asyncio.Future[list[dict[str, Any]]]
            answer = asyncio.get_running_loop().create_future()
            if not asked.done():
                asked.set_result(answer)
            return await answer

        watch = Watch(Watched(read, sessions=sessions))
        viewer = asyncio.create_task(_read_all(watch))
        answer = await asked
        answer.set_result([])
        closing = asyncio.create_task(watch.close())
        _, waiting = await asyncio.wait({closing, viewer}, timeout=TIMEOUT_SECONDS)
        assert not waiting

    asyncio.run(run())


async def _read_all(watch: Watch) -> None:
    async for _ in watch.events():
        pass
