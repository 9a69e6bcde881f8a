"""The interface between an Offloader and its transfers."""

from __future__ import annotations

from typing import Protocol

from penstock.types import Answer, Direction, Outcome, Question, Tier, Transfer, TransferId


class Transfers(Protocol):
    """Transfers run and questions asked in the background. For one owner; only `wait` blocks."""

    def has_room(self, link: Tier, direction: Direction) -> bool:
        """Whether `submit` would accept a transfer."""

    def depth(self, link: Tier, direction: Direction) -> int:
        """Number of transfers that are queued, not counting those that are running."""

    def submit(self, transfer: Transfer) -> bool:
        """Queue a transfer. Returns False, and queues nothing, if the queue is full or closed."""

    def cancel(self, transfer_id: TransferId) -> None:
        """Drop a queued transfer; a running one finishes. Either way `poll` reports it."""

    def poll(self) -> list[Outcome]:
        """Transfers that have ended since the last call."""

    def ask(self, question: Question) -> None:
        """Ask a tier which blocks it holds; `take_answers` returns the answer."""

    def take_answers(self) -> list[Answer]:
        """Answers that `poll` has received since the last call."""

    def wait(self, timeout_seconds: float) -> bool:
        """Block until there is something to poll. Returns False after the timeout."""

    def close(self, timeout_seconds: float = 10.0) -> bool:
        """Cancel queued loads, finish queued saves, stop. Returns False if a transfer hangs."""
