"""A batch job: one instruction with many different documents, all sent at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from penstock.sim.trace import TraceRequest
from penstock.sim.workloads.world import World


@dataclass(frozen=True, slots=True)
class Batch:
    """All numbers are assumptions: documents that are classified or summarised. Only the
    instruction can be a hit, so the documents' blocks should cost a cache as little as possible."""

    instruction_tokens: int = 600
    document_tokens: float = 2000.0
    output_tokens: float = 100.0
    seconds_between: float = 0.0  # between two prompts; 0: all at once

    def sessions(self, world: World) -> Iterator[Iterator[TraceRequest]]:
        chance = world.chance("batch")
        instruction = world.context().add("instruction", self.instruction_tokens)
        for number in count():
            context = instruction.fork()
            context.add(f"document {number}", chance.tokens(self.document_tokens, 0.7))
            num_output = chance.tokens(self.output_tokens, 0.5)
            moment = number * self.seconds_between
            yield iter([context.ask(moment, num_output, "", f"answer {number}")])
