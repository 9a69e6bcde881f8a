"""Questions about documents: instructions, the documents found, the question. Few are popular."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.sim.trace import TraceRequest
from penstock.sim.workloads.world import World, Zipf, starts


@dataclass(frozen=True, slots=True)
class Rag:
    """From RAGCache (Jin et al., 2024): 3% of the documents get 60% of the requests, a question has
    about 100 tokens, a document 1,000. The other numbers are assumptions."""

    questions_per_second: float = 2.0
    num_documents: int = 1000
    popularity_exponent: float = 1.1  # of Zipf's law: the first 3% of 1,000 get 62%
    documents_per_question: int = 2
    document_tokens: float = 1000.0
    question_tokens: float = 100.0
    output_tokens: float = 150.0
    system_tokens: int = 256

    def sessions(self, world: World) -> Iterator[Iterator[TraceRequest]]:
        popularity = Zipf(self.num_documents, self.popularity_exponent)
        for number, start in starts(world.chance("starts"), self.questions_per_second):
            yield iter([self._question(world, number, start, popularity)])

    def _question(self, world: World, number: int, now: float, popularity: Zipf) -> TraceRequest:
        name = f"question {number}"
        chance = world.chance(name)
        context = world.context().add("system", self.system_tokens)
        # A document drawn twice is read once. The order is that of the search results.
        drawn = [popularity.draw(chance) for _ in range(self.documents_per_question)]
        for document in dict.fromkeys(drawn):
            label = f"document {document}"
            context.add(label, world.chance(label).tokens(self.document_tokens, 0.5))
        context.add(name, chance.tokens(self.question_tokens, 0.5))
        return context.ask(now, chance.tokens(self.output_tokens), "", f"answer {number}")
