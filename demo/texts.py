"""Realistic prompts: the logbook of a hydroelectric station, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

STATIONS = (
    "Lower Tarn",
    "Kestrel Falls",
    "Abbot's Weir",
    "Grey Ghyll",
    "Sorrel Bridge",
    "High Mere",
)
KEEPERS = ("Okafor", "Lindqvist", "Marsh", "Devereux", "Tanaka", "Oyelaran", "Brandt", "Castellano")
MONTHS = ("January", "March", "April", "June", "August", "September", "November", "December")
PARTS = ("the trash rack", "the wicket gates", "the surge tank", "the draft tube", "the governor")
STATES = ("sound", "worn but serviceable", "silted", "noisy under load", "in need of a second look")
ENTRIES = (
    "Gate {gate} at {station} was opened to {share} per cent at {hour}:{minute:02}. Inflow was "
    "{flow} cubic metres a second and the head at {head:.1f} metres.",
    "{keeper} walked the penstock from the intake down and found {part} {state}. The pressure at "
    "the lower flange read {pressure:.1f} bar.",
    "Unit {unit} was stopped for {minutes} minutes so that {part} could be looked at. It is "
    "{state}; {keeper} signed for it.",
    "Rain in the upper valley raised the reservoir by {rise} centimetres. {station} asked "
    "for {power} megawatts more than the plan and was given {share} per cent of it.",
    "The grid called at {hour}:{minute:02} for {power} megawatts. Unit {unit} took the load within "
    "{minutes} seconds and held it until the evening.",
    "{keeper} noted a knock in unit {unit} at {share} per cent load, gone above it. {part} was "
    "suspected first and found {state}.",
)
QUESTIONS = (
    "Which part should be looked at first tomorrow?",
    "What did the keepers of the station report?",
    "How did the reservoir change, and why?",
    "Which unit ran worst, and what was done about it?",
    "Write one line for the shift that comes next.",
)
_MARK = "\u241e"  # placeholder for the text in the chat template


def question(number: int) -> str:
    return QUESTIONS[number % len(QUESTIONS)]


def logbook(seed: int) -> Iterator[str]:
    """Endless entries."""
    dice = random.Random(seed)
    yield f"Logbook of {dice.choice(STATIONS)} power station, volume {seed + 1}.\n"
    while True:
        entry = dice.choice(ENTRIES).format(
            gate=dice.randint(1, 6),
            unit=dice.randint(1, 4),
            station=dice.choice(STATIONS),
            keeper=dice.choice(KEEPERS),
            part=dice.choice(PARTS),
            state=dice.choice(STATES),
            share=dice.randint(5, 95),
            hour=dice.randint(0, 23),
            minute=dice.randint(0, 59),
            minutes=dice.randint(4, 90),
            rise=dice.randint(2, 60),
            power=dice.randint(3, 48),
            flow=dice.randint(40, 400),
            head=dice.uniform(60, 110),
            pressure=dice.uniform(6, 11),
        )
        yield f"\n{dice.randint(1, 28)} {dice.choice(MONTHS)}. {entry[0].upper()}{entry[1:]}"


class Writer:
    """Makes prompts of an exact length with the model's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def opening(self, seed: int, num_tokens: int) -> list[int]:
        """A conversation's first prompt: a logbook and a question, `num_tokens` in all."""
        asked = f"{_MARK}\n\n{question(seed)}"
        before, after = self._lay([{"role": "user", "content": asked}]).split(_MARK)
        head, tail = self._ids(before), self._ids(after)
        return head + self._cut(seed, num_tokens - len(head) - len(tail)) + tail

    def turn(self, answer_ids: list[int], number: int) -> list[int]:
        """What follows an answer in the next prompt: its end, a question, the start of a reply."""
        whole = self._lay(
            [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": _MARK},
                {"role": "user", "content": question(number)},
            ]
        )
        ids = self._ids(whole.split(_MARK)[1])
        return ids[1:] if answer_ids and answer_ids[-1] == ids[0] else ids

    def document(self, seed: int, num_tokens: int) -> list[int]:
        """A logbook alone."""
        return self._cut(seed, num_tokens)

    def text(self, seed: int, num_tokens: int) -> str:
        """A logbook of about `num_tokens` as text, for a request to a server."""
        text: str = self._tokenizer.decode(self._cut(seed, num_tokens))
        return text

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self._ids(self._lay(messages))

    def _cut(self, seed: int, num_tokens: int) -> list[int]:
        text = ""
        for entry in logbook(seed):
            text += entry
            if len(text) > 8 * num_tokens:  # surely enough text for `num_tokens`
                break
        return self._ids(text)[:num_tokens]

    def _lay(self, messages: list[dict[str, str]]) -> str:
        laid: str = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return laid

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
