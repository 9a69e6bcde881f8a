"""Prompts that this server computes for another one, which generates the answer.

The client gets its answer as soon as the request is accepted: routers wait for it before they ask
the other server, and that one can take each block as soon as it is computed. The prompt is computed
after that. If it fails, or this server dies, the other one computes what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.server.answers import KvTransferParams
from penstock.server.errors import ApiError

if TYPE_CHECKING:
    from penstock.server.generation import Generation
    from penstock.server.schema import GenerationRequest

log = logging.getLogger("penstock.server")


class ServerRole(StrEnum):
    """What a server does of a request that a router divides between two."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts
    DECODE = "decode"  # generates answers


class HandedOver:
    """The prompts that are being computed for other servers. Used only on the event loop."""

    def __init__(self, role: ServerRole) -> None:
        self._role = role
        self._id = uuid.uuid4().hex
        self._tasks: set[asyncio.Task[None]] = set()

    def is_asked(self, body: GenerationRequest) -> bool:
        transfer = body.kv_transfer_params
        if transfer is None or body.stream or self._role is ServerRole.DECODE:
            return False
        return bool(transfer.do_remote_decode)

    @property
    def params(self) -> KvTransferParams:
        return KvTransferParams(
            do_remote_prefill=True, do_remote_decode=False, remote_engine_id=self._id
        )

    def compute(self, generation: Generation) -> None:
        """Compute a prompt to its end, whatever becomes of its client. The engine limits them."""
        task = asyncio.create_task(self._compute(generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compute(self, generation: Generation) -> None:
        try:
            await generation.gather()
        except ApiError as error:
            log.warning("a prompt for another server was not computed to its end: %s", error)
        finally:
            generation.close()
