"""The demo from beginning to end."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anywhere
import first_token
import report
import restart
import sessions
import torch
from neighbours import Neighbours
from pace import Pace, Plan
from rich.console import Console
from stage import DTYPE, MODEL, Comparison, Screen, Stage, json_ready
from texts import Writer

from penstock.engine.models import load_model
from penstock.units import counted

LEAST_CONVERSATION_TOKENS = 192
LEAST_DOCUMENT_TOKENS = 128
_ANYWHERE_SECONDS = 14.0


@dataclass(frozen=True, slots=True)
class Settings:
    sizes: tuple[int, ...]
    num_answer: int
    sessions_seconds: float  # planned time of both runs together
    shape: sessions.Shape | None  # None: chosen by this machine's speed
    restart_tokens: int
    documents: tuple[int, int]  # how many, and tokens of each
    plan_seconds: float  # planned time of the whole demo


FULL = Settings((512, 2_048, 8_000), 8, 90.0, None, 1_024, (4, 384), 265.0)
QUICK = Settings((128, 256), 4, 10.0, sessions.Shape.of(4, 2, 80, 4, 1), 192, (2, 128), 265.0)


def tell(settings: Settings, out: Path, console: Console, started: float) -> dict[str, Any]:
    """Run all parts, then print and write the results. Returns them ready for JSON."""
    neighbours = Neighbours()
    story = _Story(settings, Screen(console), Pace(started, settings.plan_seconds))
    stage = story.set_stage()
    with _scratch(out) as scratch:
        rows, plan = story.first_tokens(stage, scratch / "first-token")
        console.print(report.first_token_rows(rows).rich())
        shape, off, on = story.sessions(stage, plan)
        console.print(report.session_rows(shape, off, on).rich())
        resumed = story.restart(stage, scratch / "kv")
        console.print(report.restart_rows(resumed).rich())
        elsewhere = story.anywhere(stage)
        console.print(report.anywhere_rows(elsewhere).rich())
    notes = [*story.notes(), *neighbours.note()]
    seconds = time.monotonic() - started
    found = report.Found(
        rows,
        shape,
        off,
        on,
        resumed,
        elsewhere,
        stage.token_bytes,
        stage.comparison.verdict,
        not stage.comparison.different,
        notes,
        f"{_machine()} The demo took {seconds:.0f} s.",
    )
    page = report.write_page(found, out)
    _finish(story.screen, stage.comparison, notes)
    story.screen.say(f"Report with charts: {page}  ({time.monotonic() - started:.0f} s)")
    ready: dict[str, Any] = json_ready(
        {
            "identical": not stage.comparison.different,
            "num_compared": stage.comparison.num_compared,
            "different": stage.comparison.different,
            "seconds": time.monotonic() - started,
            "shortened": story.cuts,
            "share_of_other_processes": neighbours.share,
            **report.as_results(found),
        }
    )
    return ready


@dataclass(slots=True)
class _Story:
    """The parts in order, and what had to be shortened for lack of time."""

    settings: Settings
    screen: Screen
    pace: Pace
    cuts: list[str] = field(default_factory=list)

    def set_stage(self) -> Stage:
        self.screen.say(f"Penstock on this machine, with {MODEL} in {DTYPE}\n", style="bold")
        began = time.monotonic()
        with self.screen.progress("loading the model") as tick:
            loaded = load_model(MODEL, dtype=DTYPE, progress=lambda words: tick(0.5, words))
        self.pace.start_seconds = max(6.0, min(15.0, time.monotonic() - began + 4))
        return Stage(loaded, Writer(loaded.tokenizer), self.screen, Comparison())

    def first_tokens(
        self, stage: Stage, directory: Path
    ) -> tuple[list[first_token.FirstToken], Plan]:
        self.screen.say("(a) Time to first token: recomputed or loaded", style="bold")
        settings, pace = self.settings, self.pace

        def replan(rest: tuple[int, ...]) -> Plan:
            return pace.plan(rest, settings.sessions_seconds, settings.restart_tokens)

        sizes, num_answer = settings.sizes, settings.num_answer
        rows, plan = first_token.measure(stage, pace, sizes, num_answer, directory, replan)
        found = dict.fromkeys(row.num_tokens for row in rows)
        for wished, size in zip(sizes, found, strict=True):
            if size < wished:
                self._cut(f"a prompt of {size:,} tokens instead of {wished:,}")
        return rows, plan

    def sessions(
        self, stage: Stage, plan: Plan
    ) -> tuple[sessions.Shape, sessions.Run, sessions.Run]:
        self.screen.say("\n(b) Many sessions in a small device pool", style="bold")
        most = max(20.0, self.pace.left_seconds - self._restart_seconds(plan.restart_tokens))
        seconds = min(plan.sessions_seconds, most)
        if seconds < self.settings.sessions_seconds:
            share = seconds / self.settings.sessions_seconds
            self._cut(f"sessions shortened to {share:.0%} of their planned time")
        shape = self.settings.shape or sessions.choose_shape(stage, self.pace, seconds)
        self.screen.say(
            f"  {shape.num_sessions} sessions of {shape.num_turns} turns, {shape.num_opening} to "
            f"about {shape.num_longest} tokens each; the pool holds {shape.pool_tokens:,} tokens"
        )
        played, off, on = sessions.compare(stage, shape, most)
        if played != shape:
            self._cut(f"{played.num_turns} turns per session instead of {shape.num_turns}")
        return played, off, on

    def restart(self, stage: Stage, directory: Path) -> restart.Restart:
        self.screen.say("\n(c) A server killed and resumed from its disk", style="bold")
        wished = self.settings.restart_tokens
        seconds = (self.pace.left_seconds - self._restart_seconds(0)) / 3
        num_tokens = max(LEAST_CONVERSATION_TOKENS, self.pace.tokens(seconds, wished))
        if num_tokens < wished:
            self._cut(f"a conversation of {num_tokens:,} tokens instead of {wished:,}")
        return restart.play(stage, num_tokens, 2 * self.settings.num_answer, directory)

    def anywhere(self, stage: Stage) -> anywhere.Anywhere:
        self.screen.say(
            "\n(d) The same documents in another order, reused anywhere: lossy, so only where a "
            "request asks for it",
            style="bold",
        )
        num_documents, wished = self.settings.documents
        # Everything is computed twice: each document alone, and all of them together.
        num_tokens = self.pace.tokens(_ANYWHERE_SECONDS / 2, num_documents * wished)
        size = max(LEAST_DOCUMENT_TOKENS, min(wished, num_tokens // num_documents))
        if size < wished:
            self._cut(f"documents of {size:,} tokens instead of {wished:,}")
        return anywhere.compare(stage, num_documents, size)

    def notes(self) -> list[str]:
        if not self.cuts:
            return []
        return [
            "This machine was too slow or too busy to run everything within five minutes: "
            f"{'; '.join(self.cuts)}."
        ]

    def _cut(self, what: str) -> None:
        self.cuts.append(what)
        self.screen.say(f"  time is short: {what}", style="yellow")

    def _restart_seconds(self, num_tokens: int) -> float:
        """Estimated time to start two servers and compute the prompt three times."""
        return 2 * self.pace.start_seconds + 10 + 3 * self.pace.seconds(num_tokens)


def _finish(screen: Screen, comparison: Comparison, notes: list[str]) -> None:
    for note in notes:
        screen.say(f"Note: {note}", style="yellow")
    for difference in comparison.different:
        screen.say(f"DIFFERENT: {difference}", style="red")
    screen.say(f"{comparison.verdict}.", "bold red" if comparison.different else "bold green")


def _machine() -> str:
    return (
        f"{MODEL} in {DTYPE}, {platform.machine()}, "
        f"{counted(len(os.sched_getaffinity(0)), 'CPU')}, torch {torch.__version__} with "
        f"{counted(torch.get_num_threads(), 'thread')}."
    )


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A directory for KV next to the results, deleted at the end."""
    directory = Path(tempfile.mkdtemp(prefix="kv-", dir=out))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
