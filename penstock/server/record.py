"""`serve --record`: a line for every request that has ended, for the simulator to play again.

No text, no token, no tenant's name is written. Blocks and tenants get names of their own, from a
random key that nobody but this process ever has: which are equal can be seen, and nothing can be
guessed at, not even by who has the model. `penstock.sim.formats.record` spells the lines out.

The engine hands over its facts and goes on; a thread names and writes. What it cannot keep up with
is left out and counted. If the file cannot be written any more, recording ends with a warning, and
the server serves on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import Empty, Full, Queue

from blake3 import blake3

from penstock.errors import ConfigError
from penstock.events import Event, Served
from penstock.sim.formats.record import (
    NAME_BYTES,
    RecordedRequest,
    heading,
    request_line,
)
from penstock.sim.trace import TraceRequest
from penstock.types import BlockKey

log = logging.getLogger("penstock.server")

_MAX_QUEUED = 4096
_MAX_BATCH = 256  # lines of one write
_SESSION_BYTES = 8
_CLOSE_SECONDS = 10.0
_TAIL_BYTES = 1 << 16
_HEADING = b'{"penstock_record"'


class Recorder:
    """An observer. Made before the model is loaded, so that a bad file costs nobody a wait."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be had. What is in it stays."""
        self._path = path
        self._descriptor = _open(path)
        self._salt = secrets.token_bytes(32)
        self._started = 0.0
        self._block_tokens = 0
        self._queue: Queue[Served | None] = Queue(_MAX_QUEUED)
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="penstock-record", daemon=True)

    def begin(self, block_tokens: int, model: str, settings: Mapping[str, object]) -> None:
        """The engine is there. Raises ConfigError if not even the heading can be written."""
        before = _block_tokens_before(self._descriptor)
        if before not in (None, block_tokens):
            raise ConfigError(
                f"--record {self._path} holds blocks of {before} tokens, and this server's have "
                f"{block_tokens}: expected one size in a file; name another."
            )
        self._started = time.monotonic()
        self._block_tokens = block_tokens
        first = heading(
            block_tokens, model=model, started_seconds=time.time(), settings=dict(settings)
        )
        try:
            self._append(first.encode())
        except OSError as error:
            raise ConfigError(_refusal(self._path, error)) from None
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Served) or not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(event)
        except Full:
            self._num_left_out += 1
            if self._num_left_out == 1:
                log.warning("%s is written too slowly: requests are left out", self._path)

    def close(self) -> None:
        """Write what is left, and let go of the file."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=_CLOSE_SECONDS)
            except Full:
                log.warning("%s is written too slowly: its end is left out", self._path)
            self._thread.join(_CLOSE_SECONDS)
        if self._num_left_out:
            log.warning("%d requests are not in %s", self._num_left_out, self._path)
        if not self._thread.is_alive():  # else it still writes: the end of the process closes it
            os.close(self._descriptor)

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take()
            try:
                self._append("".join(map(self._line, batch)).encode())
            except OSError as error:
                log.warning(
                    "%s cannot be written any more (%s): recording has ended, serving goes on",
                    self._path,
                    error.strerror or error,
                )
                return

    def _take(self) -> tuple[list[Served], bool]:
        """What there is, at least one; and whether more may come."""
        batch: list[Served] = []
        event = self._queue.get()
        try:
            while event is not None:
                batch.append(event)
                if len(batch) == _MAX_BATCH:
                    return batch, True
                event = self._queue.get_nowait()
        except Empty:
            return batch, True
        return batch, False

    def _append(self, data: bytes) -> None:
        """All or nothing, so that the file ends with a whole line."""
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, end)
            raise

    def _line(self, served: Served) -> str:
        request = TraceRequest(
            round(max(0.0, served.arrival - self._started), 6),
            served.num_prompt,
            served.num_output,
            prompt_blocks=(),
            session=self._name(served.tenant.encode(), _SESSION_BYTES) if served.tenant else "",
        )
        hits = {tier: num * self._block_tokens for tier, num in served.found}
        first = served.first_token_seconds
        recorded = RecordedRequest(
            request,
            hits,
            None if first is None else round(first, 6),
            round(served.seconds, 6),
            served.reason,
        )
        return request_line(
            recorded, self._names(served.prompt_keys), self._names(served.output_keys)
        )

    def _names(self, keys: Iterable[BlockKey]) -> list[str]:
        return [self._name(key, NAME_BYTES) for key in keys]

    def _name(self, data: bytes, num_bytes: int) -> str:
        return blake3(data, key=self._salt).digest(length=num_bytes).hex()


def _open(path: Path) -> int:
    """For appending to a new file, or to a record, whose last line is dropped if it is cut off."""
    try:
        # Not to wait for whoever reads a pipe; for a plain file it changes nothing.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(_refusal(path, error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"--record {path} is no plain file; name one that is, or a new one.")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--record {path} is being written by another server; give each a file of its own."
            ) from None
        if status.st_size:
            _check_is_record(path, descriptor)
            os.ftruncate(descriptor, _end_of_last_line(descriptor, status.st_size))
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(_refusal(path, error)) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_is_record(path: Path, descriptor: int) -> None:
    if os.pread(descriptor, len(_HEADING), 0) != _HEADING:
        raise ConfigError(
            f"--record {path} is there and is no record: expected a new file, or one that begins "
            "with a record's heading; name another, or move it away."
        )


def _block_tokens_before(descriptor: int) -> object:
    """As the file's first heading has it; None in a new one."""
    line, _, _ = os.pread(descriptor, _TAIL_BYTES, 0).partition(b"\n")
    try:
        return json.loads(line)["block_tokens"]
    except (ValueError, KeyError):
        return None


def _end_of_last_line(descriptor: int, size: int) -> int:
    while size:
        start = max(0, size - _TAIL_BYTES)
        found = os.pread(descriptor, size - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0


def _refusal(path: Path, error: OSError) -> str:
    return (
        f"--record {path} cannot be written ({error.strerror or error}): expected a file in a "
        "folder that is there, with room; name another."
    )
