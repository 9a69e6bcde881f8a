"""Least recently used: the baseline for all other policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from penstock.policies.base import Policy
from penstock.types import BlockKey


class LRU(Policy):
    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._order)

    def admit(self, key: BlockKey) -> bool:
        return True

    def insert(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        self._order[key] = None

    def insert_all(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> None:
        order = self._order
        for key in keys:
            order[key] = None

    def touch(self, key: BlockKey) -> None:
        self._order.move_to_end(key)

    def touch_all(self, keys: Sequence[BlockKey]) -> None:
        move_to_end = self._order.move_to_end
        for key in keys:
            move_to_end(key)

    def forget(self, key: BlockKey) -> None:
        del self._order[key]

    def demote(self, key: BlockKey) -> None:
        self._order.move_to_end(key, last=False)

    def pick(self, num_victims: int, is_idle: Callable[[BlockKey], bool]) -> list[BlockKey]:
        victims = list(islice(self._order, num_victims))
        if len(victims) == num_victims and all(map(is_idle, victims)):
            for key in victims:
                del self._order[key]
            return victims
        victims = []
        for _ in range(len(self._order)):
            if len(victims) == num_victims:
                break
            key, _ = self._order.popitem(last=False)
            if is_idle(key):
                victims.append(key)
            else:
                self._order[key] = None  # a leased block is in use, so it is recent
        if len(victims) < num_victims:
            for key in reversed(victims):
                self._order[key] = None
                self._order.move_to_end(key, last=False)
            return []
        return victims
