"""One instance of several that share a store: an Offloader with a small arena as its device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tools import TIMEOUT_SECONDS, content, spec

from penstock.build import build_offloader
from penstock.config import Config, HostConfig, RemoteConfig
from penstock.events import Event, Lost
from penstock.stores.host import HostArena
from penstock.types import BlockKey, BlockSpec, Done, Slot, Tier, Verdict

BLOCK_BYTES = 200_000


class Instance:
    def __init__(
        self,
        url: str,
        *,
        block_spec: BlockSpec | None = None,
        num_host: int = 64,
        num_device: int = 64,
        **remote: Any,
    ) -> None:
        self.spec = block_spec or spec(BLOCK_BYTES)
        self.device = HostArena(self.spec, num_device * self.spec.stride_bytes)
        settings: dict[str, Any] = {"timeout_seconds": 10.0, "lookup_deadline_seconds": 10.0}
        config = Config(
            host=HostConfig(size_bytes=num_host * self.spec.stride_bytes),
            remote=RemoteConfig(url=url, **{**settings, **remote}),
        )
        self.lost: Counter[tuple[Tier, Verdict]] = Counter()
        self.offloader = build_offloader(config, self.spec, self.device, observers=[self._observe])

    def save(self, keys: Sequence[BlockKey], tenant: str = "") -> list[Verdict]:
        """Save, and wait until the copies in the shared store have ended too."""
        places = [Slot(index) for index in range(len(keys))]
        for key, place in zip(keys, places, strict=True):
            self.device.view(place)[: self.spec.block_bytes] = content(key, self.spec.block_bytes)
        done = self.done(self.offloader.save(keys, places, tenant=tenant))
        self.drain()
        return list(done.verdicts)

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Ask the shared store, and wait for the answer: how many leading blocks there are."""
        lookup_id = self.offloader.lookup(keys)
        self.until(lambda: lookup_id is None or not self.offloader.is_looking_up(lookup_id))
        return self.offloader.match(keys).num_blocks

    def load(
        self, keys: Sequence[BlockKey], tenant: str = "", patience_seconds: float | None = None
    ) -> Done:
        """Whatever is called OK must be the block, bit for bit."""
        places = [Slot(index) for index in range(len(keys))]
        for place in places:
            self.device.view(place)[:] = b"\xee" * self.spec.stride_bytes
        ticket = self.offloader.load(keys, places, tenant=tenant, patience_seconds=patience_seconds)
        done = self.done(ticket)
        for key, place, verdict in zip(keys, places, done.verdicts, strict=True):
            if verdict is Verdict.OK:
                held = self.device.view(place)[: self.spec.block_bytes]
                assert held == content(key, self.spec.block_bytes)
        return done

    def done(self, ticket: Any) -> Done:
        dones = self.offloader.wait([ticket], TIMEOUT_SECONDS)
        (done,) = [done for done in dones if done.ticket == ticket]
        return done

    def drain(self) -> None:
        assert self.offloader.drain(TIMEOUT_SECONDS)
        self.offloader.step()
        self.offloader.check()

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while not is_so():
            self.offloader.step()
            self.offloader.pause(0.005)
            assert time.monotonic() < end

    def close(self) -> None:
        self.drain()
        assert self.offloader.close()

    def other(self, **changes: Any) -> BlockSpec:
        return replace(self.spec, **changes)

    def _observe(self, event: Event) -> None:
        if isinstance(event, Lost):
            self.lost[event.source, event.verdict] += event.num_blocks
