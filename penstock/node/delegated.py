"""A client of a node whose device belongs to other processes: vLLM's scheduler, and its workers.

The scheduler is the client. Its workers copy, so each of them joins the session at the node: the
node hands it the memory, and does not reuse a slot that it may still be copying.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.clock import SystemClock
from penstock.errors import ConfigError
from penstock.node.client import NodeTiers
from penstock.node.connection import connect, expect, wait_for_frame
from penstock.node.wire import VERSION, WireError
from penstock.stores.host import ArenaHandle, HostArena
from penstock.transfer.delegate import DelegatingEngine
from penstock.transfer.engine import TransferEngine
from penstock.transfer.seals import ReadSeals, Seals
from penstock.types import KEY_BYTES, BlockSpec, Direction, TicketId, Transfer, Verdict

_JOIN_SECONDS = 2.0  # the worker's step waits


class NodeLink(DelegatingEngine):
    """Hands a node's copies to workers. There is nothing below: that is the node's."""

    def __init__(self, seals: Seals, num_workers: int) -> None:
        super().__init__(TransferEngine({}, SystemClock()), seals, num_workers)

    def give_up(self) -> None:
        """Cancel what was not sent to the workers. They may still be copying the rest."""
        self._closed = True
        for transfer in self._unsent.values():
            self._end(transfer, Verdict.CANCELLED)
        self._unsent.clear()


class DelegatedNodeTiers(NodeTiers):
    """The tiers of a node for a client that orders copies from its workers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._unsynced: list[TicketId] = []  # saves since the last `sync`
        super().__init__(*args, in_one=True, accepts=self._is_in_time, **options)

    @property
    def handle(self) -> ArenaHandle:
        """What a worker needs to `join`. It changes if another node is attached to.

        Nothing is under way then, so orders with one handle never have copies of another.
        """
        place = self.place
        return ArenaHandle(
            str(self._line.path),
            place.num_slots,
            place.block_bytes,
            place.stride_bytes,
            place.token,
        )

    def save(self, *args: Any, **options: Any) -> TicketId:
        ticket = super().save(*args, **options)
        self._unsynced.append(ticket)
        return ticket

    def sync(self) -> None:
        """Wait until the copies of all saves are known, so that workers hear of them in time.

        A block may be written to after that: a copy that the node asks for later is refused. If the
        node does not answer, the saves end.
        """
        if not self._unsynced:
            return
        if not self._line.call("sync", {}, read=lambda reply: True):
            self._tickets.end_uncopied(self._unsynced, Verdict.EXPIRED)
        self._unsynced = []

    def let_go(self, timeout_seconds: float) -> bool:
        """End what workers were not sent, and remove all pins."""
        if self._closed:
            return True
        self._cancel_all()
        self._exchange()
        self._pins.remove_all()
        return not self._tickets.is_copying

    def close(self, timeout_seconds: float = 30.0) -> bool:
        """Leave. If workers still copy, the node waits until they have ended."""
        if self._closed:
            return True
        self._copies.close(timeout_seconds)
        self._exchange()
        return self._leave(timeout_seconds, ended=not self._tickets.is_copying)

    def abandon(self, timeout_seconds: float) -> bool:
        """Hang up. The node gives back everything once all processes of this client have ended."""
        self._is_abandoned = True
        if self._closed:
            return True
        self._closed = True
        self._hang_up()
        self._memory.close_files()  # the mappings keep the memory
        self._line.close()
        return True

    def _is_in_time(self, transfer: Transfer) -> bool:
        return transfer.direction is Direction.LOAD or transfer.ticket in self._unsynced


@dataclass(frozen=True, slots=True)
class Joined:
    """A node's memory in a worker's process."""

    host: HostArena
    seals: ReadSeals


def join(handle: ArenaHandle) -> Joined:
    """Join a client's session as one of its workers, and map the memory. Raises ConfigError.

    Nothing need stay open: the node watches this process until it ends.
    """
    path = Path(handle.path)
    try:
        channel = connect(path, _JOIN_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"no node is listening at {path} ({error.strerror or error}): expected the one that "
            "the scheduler uses; vLLM computes until it is back."
        ) from None
    try:
        files = []
        with suppress(OSError, AttributeError):
            files.append(os.pidfd_open(os.getpid()))
        channel.send("join", {"protocol": VERSION, "token": handle.token}, files=files)
        channel.flush()
        for file in files:
            os.close(file)
        expect(wait_for_frame(channel, _JOIN_SECONDS), "joined")
        if len(channel.files) != 2:
            raise WireError("it did not send its memory")
        return _map(handle, *channel.files)
    except (WireError, OSError, ValueError) as error:
        raise ConfigError(
            f"the node at {path} did not accept this worker: {error}; vLLM computes until it does."
        ) from None
    finally:
        channel.close()  # and the files: the mappings keep the memory


def _map(handle: ArenaHandle, file: int, seals_file: int) -> Joined:
    spec = BlockSpec(bytes(32), handle.block_bytes, 1)
    headroom = handle.stride_bytes - spec.stride_bytes
    num_bytes = handle.num_slots * handle.stride_bytes
    host = HostArena.over(file, spec, num_bytes, headroom)
    seals = mmap.mmap(
        seals_file, handle.num_slots * KEY_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
    )
    return Joined(host, ReadSeals(host, memoryview(seals)))
