"""Run many sessions in a device pool that holds only a few, with offloading off and on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pace import Pace
from stage import Answer, Stage, ask

from penstock.engine.engine import Engine
from penstock.units import counted

BLOCK_TOKENS = 16  # sessions are short: with larger blocks, much would be in partial blocks
_TURN_TOKENS = 26  # roughly what a question and the chat template add


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of both runs."""

    num_sessions: int
    num_turns: int
    num_opening: int  # tokens of each session's first prompt
    num_answer: int  # tokens of each answer
    num_held: int  # sessions at their longest that fit in the device pool
    pool_tokens: int

    @classmethod
    def of(
        cls, num_sessions: int, num_turns: int, num_opening: int, num_answer: int, num_held: int
    ) -> Shape:
        shape = cls(num_sessions, num_turns, num_opening, num_answer, num_held, 0)
        blocks = -(-shape.num_longest // BLOCK_TOKENS)
        return replace(shape, pool_tokens=num_held * blocks * BLOCK_TOKENS)

    @property
    def num_longest(self) -> int:
        """Approximate tokens of a session at its end."""
        later = (self.num_turns - 1) * (_TURN_TOKENS + self.num_answer)
        return self.num_opening + later + self.num_answer


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one of the two runs."""

    offloading: bool
    seconds: float
    processor_seconds: float
    num_prompt: int  # tokens of all prompts
    num_output: int
    num_again_next_turn: int  # recomputed prompt tokens that an earlier turn had computed
    num_again_preempted: int  # tokens recomputed after a preemption
    num_loaded: int
    num_preemptions: int
    first_token_seconds: float  # mean over the later turns, including queueing
    finished: tuple[float, ...]  # when each answer was complete, in seconds of this run
    rounds: tuple[float, ...]  # when each round of turns was complete

    @property
    def num_recomputed(self) -> int:
        return self.num_again_next_turn + self.num_again_preempted

    @property
    def tokens_per_second(self) -> float:
        """Prompt and answer tokens of all turns, per second."""
        return (self.num_prompt + self.num_output) / self.seconds


def choose_shape(stage: Stage, pace: Pace, seconds: float) -> Shape:
    """Twenty sessions of three turns, as long as possible for two runs within `seconds`."""
    sessions, turns, answer, held = 20, 3, 8, 3
    with stage.engine(held * 128, BLOCK_TOKENS) as engine, stage.screen.progress("a trial"):
        prompts = [stage.writer.opening(800 + number, 96) for number in range(held)]
        pace.observe(ask(engine, prompts, answer))
    decoding = 2 * sessions * turns * answer / held * pace.decode_seconds
    later = _TURN_TOKENS + answer
    # Without offloading every prompt is computed in full; with it, only its new tokens.
    added = (1 + 2) * later + 2 * (later + BLOCK_TOKENS // 2)
    room = max(0.0, seconds - decoding) * pace.tokens_per_second / sessions - added
    opening = int(room / (turns + 1)) // 16 * 16
    return Shape.of(sessions, turns, min(1024, max(64, opening)), answer, held)


def compare(stage: Stage, shape: Shape, max_seconds: float) -> tuple[Shape, Run, Run]:
    """Run the same turns with offloading off and on, and compare every answer.

    The two runs alternate, round by round, so that other work on the machine affects both. Each
    run's clock counts only its own rounds. From the third round on, a round that would not end
    within `max_seconds` is not started; the shape returned has the number of rounds that ran.
    """
    began = time.monotonic()
    num_tokens = shape.num_sessions * (shape.num_longest + BLOCK_TOKENS)
    tiers = stage.tiers(num_tokens)
    with (
        stage.engine(shape.pool_tokens, BLOCK_TOKENS) as plain,
        stage.engine(shape.pool_tokens, BLOCK_TOKENS, tiers) as tiered,
    ):
        off, on = _Life(stage, shape, plain), _Life(stage, shape, tiered)
        for turn in range(shape.num_turns):
            so_far = time.monotonic() - began
            if turn > 1 and so_far * (turn + 1) / turn > max_seconds:
                break
            off.play_round()
            on.play_round()
        played = replace(shape, num_turns=len(off.rounds))
        for turn in range(played.num_turns):
            for number, (expected, found) in enumerate(
                zip(off.rounds[turn], on.rounds[turn], strict=True), 1
            ):
                name = f"session {number}, turn {turn + 1}"
                stage.comparison.hold(name, expected.token_ids, found.token_ids)
        return played, off.run(), on.run()


class _Life:
    """One engine and its sessions so far."""

    def __init__(self, stage: Stage, shape: Shape, engine: Engine) -> None:
        self._stage, self._shape, self._engine = stage, shape, engine
        self._ends: list[float] = []
        self._processor_seconds = 0.0
        self._finished: list[float] = []
        self.rounds: list[list[Answer]] = []

    def play_round(self) -> None:
        """Run the next turn of every session, all at once."""
        turn, shape = len(self.rounds) + 1, self._shape
        name = "off" if self._engine.offloader is None else "on"
        so_far = self._ends[-1] if self._ends else 0.0
        with self._stage.screen.progress(
            f"offloading {name}, turn {turn} of {shape.num_turns}"
        ) as tick:
            started, used = time.monotonic(), time.process_time()
            answers = ask(self._engine, self._prompts(), shape.num_answer, tick)
            ended = time.monotonic()
            self._processor_seconds += time.process_time() - used
        self.rounds.append(answers)
        self._ends.append(so_far + ended - started)
        self._finished += sorted(so_far + answer.finished - started for answer in answers)
        num_preemptions = self._engine.scheduler.num_preemptions
        self._stage.screen.say(
            f"  turn {turn}, offloading {name:<3} {shape.num_sessions} answers in "
            f"{ended - started:>5.1f} s, {counted(num_preemptions, 'preemption')} so far"
        )

    def _prompts(self) -> list[list[int]]:
        writer, turn = self._stage.writer, len(self.rounds)
        if turn == 0:
            sessions = range(self._shape.num_sessions)
            return [writer.opening(100 + number, self._shape.num_opening) for number in sessions]
        return [
            last.prompt_ids + last.token_ids + writer.turn(last.token_ids, number + turn)
            for number, last in enumerate(self.rounds[-1])
        ]

    def run(self) -> Run:
        answers = [answer for answers in self.rounds for answer in answers]
        later = [answer for answers in self.rounds[1:] for answer in answers]
        return Run(
            self._engine.offloader is not None,
            self._ends[-1],
            self._processor_seconds,
            sum(len(answer.prompt_ids) for answer in answers),
            sum(len(answer.token_ids) for answer in answers),
            _num_again(self.rounds),
            sum(answer.num_recomputed for answer in answers),
            sum(answer.num_loaded for answer in answers),
            self._engine.scheduler.num_preemptions,
            sum(answer.first_token_seconds for answer in later) / len(later),
            tuple(self._finished),
            tuple(self._ends),
        )


def _num_again(rounds: Sequence[Sequence[Answer]]) -> int:
    """Prompt tokens that an earlier turn of the session had computed and a later one recomputed."""
    total = 0
    for before, after in pairwise(rounds):
        for last, this in zip(before, after, strict=True):
            # The KV of an answer's last token is computed by the turn that reads it.
            num_known = len(last.prompt_ids) + len(last.token_ids) - 1
            total += max(0, num_known - this.num_cached)
    return total
