"""The sequences that decode, advanced many steps at once. Pure.

All of them take the same steps, one token each. So one step counter serves all, and each sequence
knows the step at which it is due: when it completes a block or ends. Until the first one is due,
any number of steps can be taken at once.
"""

from __future__ import annotations

from heapq import heappop, heappush

from penstock.sim.sequences import Sequence, SequencePhase


class Decoders:
    def __init__(self) -> None:
        self._step = 0
        self._order: list[tuple[int, int, Sequence]] = []  # a heap, by the step they are due
        self._count = 0
        self._num_context_tokens = 0  # read by all of them in the next step

    def __len__(self) -> int:
        return self._count

    @property
    def num_context_tokens(self) -> int:
        return self._num_context_tokens

    @property
    def num_steps_until_check(self) -> int:
        """Steps until the first sequence is due. There must be one."""
        self._drop_removed()
        return self._order[0][0] - self._step

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has room for its next token."""
        request, block_tokens = sequence.request, sequence.block_tokens
        last = request.num_input_tokens + sequence.num_output_tokens - 1
        num_to_block = block_tokens - sequence.num_computed % block_tokens
        num_steps = min(num_to_block, last - sequence.num_computed)
        sequence.phase = SequencePhase.DECODING
        sequence.decodes_since = self._step
        sequence.decodes_until = self._step + num_steps
        heappush(self._order, (sequence.decodes_until, sequence.number, sequence))
        self._count += 1
        self._num_context_tokens += sequence.num_computed + 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is preempted, and update its counts."""
        self._leave(sequence)

    def advance(self, num_steps: int) -> list[Sequence]:
        """Take steps, at most until the first sequence is due. Returns those that are due."""
        self._step += num_steps
        self._num_context_tokens += num_steps * self._count
        due: list[Sequence] = []
        self._drop_removed()
        while self._order and self._order[0][0] <= self._step:
            _, _, sequence = heappop(self._order)
            self._leave(sequence)
            due.append(sequence)
            self._drop_removed()
        due.sort(key=lambda sequence: sequence.number)
        return due

    def _leave(self, sequence: Sequence) -> None:
        num_taken = self._step - sequence.decodes_since
        sequence.num_computed += num_taken
        sequence.num_tokens += num_taken
        sequence.decodes_until = -1
        self._count -= 1
        self._num_context_tokens -= sequence.num_computed + 1

    def _drop_removed(self) -> None:
        """Drop removed sequences from the front of the heap."""
        while self._order and self._order[0][0] != self._order[0][2].decodes_until:
            heappop(self._order)
