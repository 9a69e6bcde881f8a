"""Agents that call tools: the context only grows, calls are milliseconds to minutes apart, and
sometimes several subagents continue from the same context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.sim.trace import TraceRequest
from penstock.sim.workloads.context import Context
from penstock.sim.workloads.world import TOKEN_SECONDS, Chance, World, starts


@dataclass(frozen=True, slots=True)
class Agents:
    """Steps follow TraceLab (Zhu et al., 2026: in a coding agent's session, a median of 15 calls
    follow a tool's result), answers follow Mooncake's tool and agent trace (FAST'25: a mean of 182
    tokens). Tools, their results and subagents are assumptions."""

    tasks_per_second: float = 0.1
    mean_steps: float = 20.0
    system_tokens: int = 4000  # instructions and tool descriptions, the same for all agents
    task_tokens: float = 500.0
    result_tokens: float = 700.0
    output_tokens: float = 182.0
    min_tool_seconds: float = 0.05
    max_tool_seconds: float = 180.0
    subagent_share: float = 0.05  # share of steps that start subagents
    num_subagents: int = 3
    mean_subagent_steps: float = 4.0
    max_context_tokens: int = 65536  # a task ends once its context is longer

    def sessions(self, world: World) -> Iterator[Iterator[TraceRequest]]:
        for number, start in starts(world.chance("starts"), self.tasks_per_second):
            name = f"agent-{number}"
            chance = world.chance(name)
            context = world.context().add("system", self.system_tokens)
            context.add(f"{name} task", chance.tokens(self.task_tokens))
            yield self._agent(chance, name, start, context)

    def _agent(
        self, chance: Chance, name: str, now: float, context: Context
    ) -> Iterator[TraceRequest]:
        for step in range(chance.times(self.mean_steps)):
            if step and context.num_tokens > self.max_context_tokens:
                return
            request, now = self._call(chance, name, f"{name} step {step}", now, context)
            yield request
            if chance.random() < self.subagent_share:
                subagents = self._subagents(chance, f"{name} step {step}", name, now, context)
                yield from subagents
                now = max(now, subagents[-1].arrival_seconds) + self._tool_seconds(chance)
                for number in range(self.num_subagents):
                    label = f"{name} step {step} report {number}"
                    context.add(label, chance.tokens(self.output_tokens))

    def _subagents(
        self, chance: Chance, label: str, session: str, now: float, context: Context
    ) -> list[TraceRequest]:
        """All requests of the subagents, in order of arrival; they share the context so far."""
        asked = []
        for number in range(self.num_subagents):
            own = f"{label} subagent {number}"
            part, moment = context.fork().add(own, chance.tokens(self.task_tokens)), now
            for step in range(chance.times(self.mean_subagent_steps)):
                request, moment = self._call(chance, session, f"{own} step {step}", moment, part)
                asked.append(request)
        return sorted(asked, key=lambda request: request.arrival_seconds)

    def _call(
        self, chance: Chance, session: str, label: str, now: float, context: Context
    ) -> tuple[TraceRequest, float]:
        """Make one call and add the tool's result. Returns the request and the next call's time."""
        num_output = chance.tokens(self.output_tokens)
        request = context.ask(now, num_output, session, f"{label} answer")
        context.add(f"{label} result", chance.tokens(self.result_tokens))
        return request, now + num_output * TOKEN_SECONDS + self._tool_seconds(chance)

    def _tool_seconds(self, chance: Chance) -> float:
        return chance.seconds_between(self.min_tool_seconds, self.max_tool_seconds)
