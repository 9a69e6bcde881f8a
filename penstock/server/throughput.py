"""Every ten seconds of work, one log line: tokens per second, running and waiting, hits."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from penstock.server.backend import Backend
from penstock.server.dashboard import samples_of
from penstock.watch.samples import Samples

log = logging.getLogger("penstock.server")

EVERY_SECONDS = 10.0


class ThroughputLog:
    """Reads our own metrics, which takes about a millisecond."""

    def __init__(self, backend: Backend, every_seconds: float = EVERY_SECONDS) -> None:
        self._backend = backend
        self._every_seconds = every_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, in a running loop. Does nothing unless the log is at info level."""
        if log.isEnabledFor(logging.INFO):
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        before, num_before, at_before = Samples({}), 0, time.monotonic()
        while True:
            await asyncio.sleep(self._every_seconds)
            try:
                now, num_now, at = samples_of(self._backend), self._num_output, time.monotonic()
                line = throughput_line(now.since(before), num_now - num_before, at - at_before)
                before, num_before, at_before = now, num_now, at
            except Exception:
                log.exception("the throughput could not be logged")
                continue
            if line is not None:
                log.info("%s", line)

    @property
    def _num_output(self) -> int:
        return 0 if self._backend.serving is None else self._backend.serving.spoken.num_tokens


def throughput_line(late: Samples, num_output: int, seconds: float) -> str | None:
    """The line for the last `seconds`, counted in `late`; None if nothing happened."""
    prompt = late.by("penstock_prompt_tokens_total", "source")
    sequences = late.by("penstock_sequences", "phase")
    num_prompt = sum(prompt.values())
    if not (num_output or num_prompt or sum(sequences.values())):
        return None
    computed = prompt.get("computed", 0.0)
    parts = [
        f"prompts {computed / seconds:.1f} tokens/s computed",
        f"answers {num_output / seconds:.1f} tokens/s",
        f"running {sequences.get('running', 0.0):.0f}",
        f"waiting {sequences.get('waiting', 0.0) + sequences.get('loading', 0.0):.0f}",
    ]
    capacity = late.total("penstock_capacity_blocks", tier="device")
    if capacity:
        used = late.total("penstock_used_blocks", tier="device")
        parts.append(f"device KV in use {100 * used / capacity:.1f}%")
    if num_prompt:
        parts.append(f"prompt tokens from cache {100 * (1 - computed / num_prompt):.1f}%")
    return "throughput: " + ", ".join(parts)
