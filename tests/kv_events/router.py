"""A reader of KV events, as a router is one: it knows what it was told, and checks that it fits."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgpack
import zmq

Place = tuple[str, str | None]  # medium and locality
GPU, CPU = ("GPU", None), ("CPU", "LOCAL")
DISK, REMOTE = ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")


class Router:
    def __init__(self) -> None:
        self.held: dict[Place, set[int]] = defaultdict(set)
        self.events: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.tokens: dict[int, tuple[int, ...]] = {}  # of the whole prompt up to a block
        self.salts: dict[int, str | None] = {}

    def read(self, payload: bytes) -> None:
        seconds, events, rank = msgpack.unpackb(payload)
        assert isinstance(seconds, float)
        assert rank == 0
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
            return
        place = (event["medium"], event.get("locality"))
        if event["type"] == "BlockRemoved":
            self.held[place] -= set(event["block_hashes"])
            return
        assert event["type"] == "BlockStored"
        size, parent = event["block_size"], event["parent_block_hash"]
        extra_keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        assert len(extra_keys) == len(event["block_hashes"])
        for number, block in enumerate(event["block_hashes"]):
            if parent is not None:
                assert parent in self.tokens, "a block is published before its parent"
            before = self.tokens[parent] if parent is not None else ()
            tokens = before + tuple(event["token_ids"][number * size : (number + 1) * size])
            assert self.tokens.setdefault(block, tokens) == tokens
            salt = event.get("cache_salt")
            assert extra_keys[number] == ([salt] if salt and parent is None else None)
            assert parent is None or self.salts[parent] == salt
            self.salts[block] = salt
            self.held[place].add(block)
            parent = block

    def prompts(self, place: Place) -> set[tuple[str | None, tuple[int, ...]]]:
        """The prompts up to each block that is held there, and their salts."""
        return {(self.salts[block], self.tokens[block]) for block in self.held[place]}


class SubscribedRouter(Router):
    """Reads from a publisher's socket."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        super().__init__()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)
        self.topics: set[bytes] = set()

    def wait(self, seconds: float = 60.0) -> None:
        """Read the next batch."""
        assert self._socket.poll(int(seconds * 1000)), "no event arrives"
        topic, number, payload = self._socket.recv_multipart()
        self.topics.add(topic)
        self.numbers.append(int.from_bytes(number, "big"))
        self.read(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)
