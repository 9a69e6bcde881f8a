"""Conversations with an assistant. Each turn repeats all turns before it, after some thinking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.sim.trace import TraceRequest
from penstock.sim.workloads.world import TOKEN_SECONDS, World, Zipf, starts


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Turns and lengths are WildChat's means (Zhao et al., ICLR'24: 2.54 turns, 296 tokens per
    question and 441 per answer). Rates, thinking times and system prompts are assumptions."""

    sessions_per_second: float = 0.5
    mean_turns: float = 2.54
    user_tokens: float = 296.0
    output_tokens: float = 441.0
    num_system_prompts: int = 4  # one per assistant; the first is the most popular
    system_tokens: int = 512
    think_seconds: float = 60.0  # mean time between an answer and the next question
    max_context_tokens: int = 32768  # a conversation ends before it gets longer

    def sessions(self, world: World) -> Iterator[Iterator[TraceRequest]]:
        popularity = Zipf(self.num_system_prompts, 1.0)
        for number, start in starts(world.chance("starts"), self.sessions_per_second):
            yield self._session(world, number, start, popularity)

    def _session(
        self, world: World, number: int, now: float, popularity: Zipf
    ) -> Iterator[TraceRequest]:
        name = f"chat-{number}"
        chance = world.chance(name)
        context = world.context()
        context.add(f"system {popularity.draw(chance)}", self.system_tokens)
        for turn in range(chance.times(self.mean_turns)):
            num_asked = chance.tokens(self.user_tokens)
            num_output = chance.tokens(self.output_tokens)
            if turn and context.num_tokens + num_asked + num_output > self.max_context_tokens:
                return
            context.add(f"{name} user {turn}", num_asked)
            yield context.ask(now, num_output, name, f"{name} answer {turn}")
            now += num_output * TOKEN_SECONDS + chance.around(self.think_seconds)
