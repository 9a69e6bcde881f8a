"""`serve --record`: one line for each request that has ended, for the simulator to replay.

No text, token or tenant name is written. Blocks and tenants get pseudonyms from a random key that
never leaves this process: equal ones can be recognized, but nothing can be guessed, not even with
the model at hand. `penstock.sim.formats.record` describes the lines.

The engine only queues its facts; a thread writes them. Requests that it cannot keep up with are
left out and counted. If the file can no longer be written, recording ends with a warning and the
server continues.
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
from collections.abc import Mapping
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
from penstock.sim.trace import TraceRequest, TraceSegment

log = logging.getLogger("penstock.server")

_MAX_QUEUED = 4096
_MAX_BATCH = 256  # lines per write
_SESSION_BYTES = 8
_CLOSE_SECONDS = 10.0
_TAIL_BYTES = 1 << 16
_HEADING = b'{"penstock_record"'


class Recorder:
    """An observer. Created before the model loads, so that a bad file is reported at once."""

    def __init__(self, path: Path) -> None:
        """Opens the file to append. Raises ConfigError if that fails."""
        self._path = path
        self._descriptor = _open(path)
        self._salt = secrets.token_bytes(32)
        self._started = 0.0
        self._block_tokens = 0
        self._queue: Queue[Served | None] = Queue(_MAX_QUEUED)
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="penstock-record", daemon=True)

    def begin(self, block_tokens: int, model: str, settings: Mapping[str, object]) -> None:
        """Start, once the engine is open. Raises ConfigError if the heading cannot be written."""
        before = _block_tokens_before(self._descriptor)
        if before not in (None, block_tokens):
            raise ConfigError(
                f"--record {self._path} has blocks of {before} tokens, but this server's blocks "
                f"have {block_tokens}: expected one size per file; choose another file."
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
                log.warning("writing %s is too slow: some requests are left out", self._path)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=_CLOSE_SECONDS)
            except Full:
                log.warning("writing %s is too slow: its end is left out", self._path)
            self._thread.join(_CLOSE_SECONDS)
        if self._num_left_out:
            log.warning("requests left out of %s: %d", self._path, self._num_left_out)
        if (
            not self._thread.is_alive()
        ):  # else it still writes, and the file is closed with the process
            os.close(self._descriptor)

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._take()
            try:
                self._append("".join(map(self._line, batch)).encode())
            except OSError as error:
                log.warning(
                    "%s can no longer be written (%s): recording has ended, the server continues",
                    self._path,
                    error.strerror or error,
                )
                return

    def _take(self) -> tuple[list[Served], bool]:
        """What is queued, at least one event; and whether more may follow."""
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
            served.prompt_keys,
            served.output_keys,
            self._name(served.tenant.encode(), _SESSION_BYTES) if served.tenant else "",
            tuple(
                TraceSegment(each.start, each.keys, each.num_first_tokens, each.blend_share)
                for each in served.segments
            ),
            tuple(served.plain_keys()),
        )
        hits = {tier: num * self._block_tokens for tier, num in served.found}
        first = served.first_token_seconds
        recorded = RecordedRequest(
            request,
            hits,
            None if first is None else round(first, 6),
            round(served.seconds, 6),
            served.reason,
            served.num_reused,
            served.num_mended,
        )
        return request_line(recorded, lambda key: self._name(key, NAME_BYTES))

    def _name(self, data: bytes, num_bytes: int) -> str:
        return blake3(data, key=self._salt).digest(length=num_bytes).hex()


def _open(path: Path) -> int:
    """Opens a new file or a record to append. An incomplete last line is dropped."""
    try:
        # O_NONBLOCK: opening a pipe would wait for its reader. No effect on regular files.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(_refusal(path, error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"--record {path} is not a regular file; choose another.")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--record {path} is being written by another server; use one file per server."
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
            f"--record {path} exists and is not a record: expected a new file, or one that begins "
            "with a record's heading; choose another, or move it away."
        )


def _block_tokens_before(descriptor: int) -> object:
    """`block_tokens` in the file's first heading; None in a new file."""
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
        f"--record {path} cannot be written ({error.strerror or error}): expected a path in an "
        "existing folder with free space; choose another."
    )
