"""Code completion: a repository's outline, open files that are edited, then the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.sim.trace import TraceRequest
from penstock.sim.workloads.context import Context
from penstock.sim.workloads.world import TOKEN_SECONDS, Chance, World, Zipf, starts


@dataclass(slots=True)
class _File:
    label: str
    num_tokens: int
    edited_from: int  # tokens before this are as in the repository
    version: str = ""  # identifies the latest edit and its author

    def write_to(self, context: Context) -> None:
        context.add(self.label, self.edited_from)
        context.add(f"{self.label} {self.version}", self.num_tokens - self.edited_from)


@dataclass(frozen=True, slots=True)
class Code:
    """A developer works in bursts of short completions, many of which follow an edit. An edit
    changes one open file from some token on, and so the rest of the prompt.

    Answers are short, as in Azure's code trace (Splitwise, ISCA'24: a median of 13 tokens). The
    outline (shared by all developers of a repository), files, edits and bursts are assumptions.
    """

    developers_per_second: float = 0.05
    num_repositories: int = 8
    outline_tokens: int = 6000
    num_open_files: int = 4
    file_tokens: float = 800.0
    cursor_tokens: float = 200.0
    output_tokens: float = 30.0
    mean_bursts: float = 6.0
    mean_burst_requests: float = 12.0
    key_seconds: float = 4.0  # mean time between the completions of a burst
    pause_seconds: float = 300.0  # mean time between bursts
    edit_share: float = 0.5  # share of completions that follow an edit of an open file

    def sessions(self, world: World) -> Iterator[Iterator[TraceRequest]]:
        popularity = Zipf(self.num_repositories, 1.0)
        for number, start in starts(world.chance("starts"), self.developers_per_second):
            yield self._developer(world, number, start, popularity)

    def _developer(
        self, world: World, number: int, now: float, popularity: Zipf
    ) -> Iterator[TraceRequest]:
        name = f"developer-{number}"
        chance = world.chance(name)
        repository = f"repository {popularity.draw(chance)}"
        outline = world.context().add(repository, self.outline_tokens)
        files = [self._file(world, chance, repository) for _ in range(self.num_open_files)]
        num_asked = 0
        for burst in range(chance.times(self.mean_bursts)):
            if burst:
                now += chance.around(self.pause_seconds)
            for _ in range(chance.times(self.mean_burst_requests)):
                if chance.random() < self.edit_share:
                    edited = chance.choice(files)
                    place = int(edited.num_tokens * chance.random())
                    edited.edited_from = min(edited.edited_from, place)
                    edited.version = f"{name} {num_asked}"
                context = outline.fork()
                for file in files:
                    file.write_to(context)
                context.add(f"{name} cursor {num_asked}", chance.tokens(self.cursor_tokens, 0.5))
                num_output = chance.tokens(self.output_tokens)
                yield context.ask(now, num_output, name, f"{name} answer {num_asked}")
                num_asked += 1
                now += num_output * TOKEN_SECONDS + chance.around(self.key_seconds)

    def _file(self, world: World, chance: Chance, repository: str) -> _File:
        label = f"{repository} file {int(50 * chance.random() ** 2)}"  # some are popular
        num_tokens = world.chance(label).tokens(self.file_tokens, 0.7)
        return _File(label, num_tokens, num_tokens)
