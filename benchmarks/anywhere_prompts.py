"""Prompts for `anywhere_quality`: documents in random order, with questions or a text to continue.

- Questions: each document describes an invented person, town or machine in a few sentences. A
  question asks for one fact of one document, or needs two documents: one names a town, the other
  describes it. Within a prompt no two documents give the same answer.
- Passages: documents are parts of this project's documentation. The prompt ends with the beginning
  of the text that follows one of them; what follows next is the continuation.

All documents of a prompt are segments: their KV may be used anywhere. The same checkout gives the
same prompts; `digest` says whether two runs had the same.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_DOCUMENTS, MAX_DOCUMENTS = 4, 8
CONTINUATION_TOKENS = 32
_MIN_PASSAGE, _MAX_PASSAGE = 100, 200  # tokens
_BEGUN_TOKENS = 48  # of the text to continue
_TWO_DOCUMENTS_EVERY = 4  # questions

_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str  # "one document", "two documents" or "passages"
    tokens: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]  # where each document begins and ends
    fact: str = ""  # what the answer must contain; empty for passages
    continuation: tuple[int, ...] = ()  # of passages: the text that follows


ONE, TWO, PASSAGES = "one document", "two documents", "passages"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What documents of one kind say. Sentences have the fields {name} and {it}, the fact."""

    names: Callable[[random.Random], str]
    opening: tuple[str, ...]
    sentences: dict[str, tuple[str, ...]]
    facts: dict[str, Sequence[str]]
    fillers: tuple[str, ...]
    # For each fact that is asked for: the question, and how the answer begins.
    questions: dict[str, tuple[str, str]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names are made of common words: a small model that has to copy a rare one fails at spelling.
_SURNAMES = _words(
    "Adams Bennett Clarke Dixon Ellis Foster Graham Howard Irving Jensen Keller Lawson "
    "Morris Norton Parker Reed Stone Turner"
)
_TOWN_BEGINNINGS = _words(
    "Bright Cold East Grand High Iron Long North Silver South Spring Summer West Winter"
)
_TOWN_ENDS = _words("Bay Bridge Falls Grove Harbor Hill Lake Park Point Valley")
_FIRST_NAMES = _words(
    "Anna Boris Clara David Emma Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga "
    "Peter Rosa Simon Vera"
)
_RIVERS = _words(
    "Alma Brenta Clyde Dora Elba Foyle Garonne Inn Kama Loire Maas Neva Oder Piave Rhone "
    "Severn Tagus Weser Yonne"
)
_BRANDS = _words(
    "Atlas Comet Delta Eagle Falcon Jupiter Lion Omega Orion Phoenix Rocket Tiger Titan"
)
_MACHINES = _words("crane drill engine fan lamp mixer motor press printer pump saw valve")
_COLOURS = _words("black blue brown green orange pink purple red white yellow")


def _numbers(start: int, end: int) -> Sequence[str]:
    return [str(number) for number in range(start, end)]


_PERSON = _Kind(
    names=lambda rng: f"{rng.choice(_FIRST_NAMES)} {rng.choice(_SURNAMES)}",
    opening=(
        "This page is about {name}.",
        "Here is what we know about {name}.",
        "The following is a short portrait of {name}.",
    ),
    sentences={
        "job": (
            "{name} works as a {it}, and has done so for many years.",
            "For a living, {name} is a {it}.",
        ),
        "instrument": (
            "In the evening {name} plays the {it}, mostly for friends.",
            "{name} plays the {it} and practises almost every day.",
        ),
        "pet": (
            "At home {name} keeps a {it}, which is already quite old.",
            "{name} has a {it} as a pet.",
        ),
        "food": (
            "The favourite food of {name} is {it}, above all on Sundays.",
            "When friends visit, they all eat {it}, the favourite food of {name}.",
        ),
        "year": (
            "{name} was born in the year {it}, as the youngest of the family.",
            "In the year {it} {name} was born.",
        ),
        "car": (
            "{name} drives a {it} car, which stands in front of the house.",
            "The car of {name} is {it}.",
        ),
        "town": (
            "{name} lives in the town of {it} with the family.",
            "For ten years {name} has lived in the town of {it}, near an old oak.",
        ),
    },
    facts={
        "job": _words(
            "baker carpenter dentist farmer gardener journalist lawyer nurse painter pilot "
            "plumber sailor tailor teacher translator"
        ),
        "instrument": _words(
            "accordion cello clarinet drums flute guitar harp oboe organ piano saxophone "
            "trombone trumpet violin"
        ),
        "pet": _words(
            "canary cat dog ferret goat goldfish hamster hedgehog lizard parrot pony rabbit "
            "snake spider turtle"
        ),
        "food": _words(
            "bread cheese curry dumplings lasagna lentils mushrooms omelette pancakes pizza "
            "potatoes salmon soup spinach sushi"
        ),
        "year": _numbers(1940, 2000),
        "car": _COLOURS,
    },
    fillers=(
        "Neighbours describe a calm and friendly person who likes to laugh.",
        "There are many photographs from that time, but few letters.",
        "Summers are usually spent at the lake, together with old friends.",
        "A brother moved abroad long ago and writes from time to time.",
        "Nobody remembers a single day of bad temper.",
    ),
    questions={
        "job": ("What is the job of {name}?", "{name} works as a"),
        "instrument": ("Which instrument does {name} play?", "{name} plays the"),
        "pet": ("Which pet does {name} have?", "{name} has a"),
        "food": ("What is the favourite food of {name}?", "The favourite food of {name} is"),
        "year": ("In which year was {name} born?", "{name} was born in the year"),
        "car": ("What colour is the car of {name}?", "The car of {name} is"),
        "town": ("Where does {name} live?", "{name} lives in the town of"),
    },
)

_TOWN = _Kind(
    names=lambda rng: f"{rng.choice(_TOWN_BEGINNINGS)} {rng.choice(_TOWN_ENDS)}",
    opening=(
        "{name} is a small town in the hills.",
        "This page describes the town of {name}.",
        "The town of {name} is described here.",
    ),
    sentences={
        "river": (
            "The river that flows through {name} is called the {it}.",
            "Through {name} flows a river, the {it}, which often floods in spring.",
        ),
        "fair": (
            "The great fair of {name} takes place in {it}, on the main square.",
            "In {it} the great fair of {name} takes place, with fruit and flowers.",
        ),
        "industry": (
            "{name} is known for its {it}, which is sold in the whole country.",
            "Visitors know {name} for its {it}.",
        ),
        "year": (
            "{name} was founded in the year {it}, after a long war.",
            "In the year {it} {name} was founded by fishermen.",
        ),
        "building": (
            "The oldest building in {name} is the {it}, which is open to visitors.",
            "In the centre of {name} stands the {it}, the oldest building of all.",
        ),
        "mayor": (
            "The mayor of {name} is called {it}.",
            "{name} has had the same mayor for years, {it}.",
        ),
    },
    facts={
        "river": _RIVERS,
        "fair": _words(
            "January February March April May June July August September October November December"
        ),
        "industry": _words(
            "beer butter carpets cheese clocks furniture glass honey lace leather paper "
            "pottery salt silk wine wool"
        ),
        "year": _numbers(1100, 1900),
        "building": _words(
            "abbey barn castle chapel church hospital library mill palace prison school "
            "theatre tower university"
        ),
        "mayor": [f"{first} {last}" for first in _FIRST_NAMES for last in ("Adler", "Moss")],
    },
    fillers=(
        "The streets are narrow, and most houses have steep roofs.",
        "In winter the snow stays for weeks, and the schools close early.",
        "Trains stop here twice an hour, and a bus goes to the coast.",
        "Young people often leave for the capital, but many come back later.",
        "A map of the walks around it hangs at the station.",
    ),
    questions={
        "river": (
            "Which river flows through {name}?",
            "The river that flows through {name} is called the",
        ),
        "fair": (
            "In which month is the great fair of {name}?",
            "The great fair of {name} takes place in",
        ),
        "industry": ("What is {name} known for?", "{name} is known for its"),
        "year": ("In which year was {name} founded?", "{name} was founded in the year"),
        "building": (
            "What is the oldest building in {name}?",
            "The oldest building in {name} is the",
        ),
    },
)

_MACHINE = _Kind(
    names=lambda rng: f"{rng.choice(_BRANDS)} {rng.choice(_MACHINES)}",
    opening=(
        "This sheet describes the {name}.",
        "The {name} is listed here with all its details.",
        "Here are the details of the {name}.",
    ),
    sentences={
        "colour": (
            "The {name} is painted {it}, so that it is easily seen.",
            "The colour of the {name} is {it}.",
        ),
        "material": (
            "The housing of the {name} is made of {it}.",
            "The {name} has a housing that is made of {it}.",
        ),
        "weight": (
            "The {name} weighs {it} kilograms without its base.",
            "With all covers closed, the {name} weighs {it} kilograms.",
        ),
        "place": (
            "The {name} stands in the {it}, next to the door.",
            "You find the {name} in the {it}.",
        ),
        "hours": (
            "The {name} must be oiled after {it} hours.",
            "After {it} hours of work, the {name} must be oiled.",
        ),
        "town": (
            "The {name} comes from the town of {it} and was brought here by train.",
            "From the town of {it} comes the {name}, which was brought here by ship.",
        ),
    },
    facts={
        "colour": _COLOURS,
        "material": _words(
            "aluminium brass bronze ceramic concrete copper glass iron plastic rubber steel "
            "titanium wood zinc"
        ),
        "weight": _numbers(110, 990),
        "place": _words(
            "attic basement cellar corridor garage garden kitchen laboratory office shed "
            "stable warehouse workshop yard"
        ),
        "hours": _numbers(110, 990),
    },
    fillers=(
        "It is checked once a year, and so far no fault has been found.",
        "Please close all covers before you switch it on.",
        "Spare parts can be ordered by telephone and arrive within a week.",
        "The handbook lies in the drawer on the left.",
        "Only trained staff may open it.",
    ),
    questions={
        "colour": ("What colour is the {name}?", "The {name} is painted"),
        "material": ("What is the housing of the {name} made of?", "It is made of"),
        "weight": ("How many kilograms does the {name} weigh?", "The {name} weighs"),
        "place": ("Where does the {name} stand?", "The {name} stands in the"),
        "hours": ("After how many hours must the {name} be oiled?", "It must be oiled after"),
        "town": ("Where does the {name} come from?", "The {name} comes from the town of"),
    },
)

_KINDS = (_PERSON, _TOWN, _MACHINE)
_TASK = "Read the documents and answer the question.\n\n"
_EXAMPLE = (
    f"{_TASK}"
    "Document:\nThis page is about Otto Example. Otto Example wears a grey hat. Otto Example lives "
    "in the town of Samplewood.\n\n"
    "Document:\nThe town of Samplewood is described here. The flag of Samplewood shows a lion. The "
    "bell of Samplewood is made of tin.\n\n"
)
# How to answer a question of each kind, or the model would stop halfway.
_HEADS = {
    ONE: f"{_EXAMPLE}"
    "Question: What colour is the hat of Otto Example?\n"
    "Answer: The hat of Otto Example is grey.\n\n"
    "Question: What does the flag of Samplewood show?\n"
    "Answer: The flag of Samplewood shows a lion.\n\n"
    f"{_TASK}",
    TWO: f"{_EXAMPLE}"
    "Question: Where does Otto Example live, and what does the flag of this town show?\n"
    "Answer: Otto Example lives in the town of Samplewood, and the flag of Samplewood shows a "
    "lion.\n\n"
    "Question: Where does Otto Example live, and what is the bell of this town made of?\n"
    "Answer: Otto Example lives in the town of Samplewood, and the bell of Samplewood is made of "
    "tin.\n\n"
    f"{_TASK}",
}


class _World:
    """The documents of one prompt. No fact and no name occurs twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()
        self.documents: list[str] = []

    def new(self, choose: Callable[[], str]) -> str:
        while (found := choose()) in self._used:
            pass
        self._used.add(found)
        return found

    def name(self, kind: _Kind) -> str:
        return self.new(lambda: kind.names(self._rng))

    def describe(self, kind: _Kind, name: str, town: str | None = None) -> dict[str, str]:
        """Add a document; return its facts."""
        rng = self._rng
        facts = {
            what: self.new(lambda values=values: rng.choice(values))  # type: ignore[misc]
            for what, values in kind.facts.items()
        }
        if "town" in kind.sentences:
            facts["town"] = town or self.name(_TOWN)
        sentences = [
            rng.choice(kind.sentences[what]).format(name=name, it=it) for what, it in facts.items()
        ]
        sentences += rng.sample(kind.fillers, 3)
        rng.shuffle(sentences)
        sentences.insert(0, rng.choice(kind.opening).format(name=name))
        self.documents.append(" ".join(sentences))
        return facts


def question_prompts(
    tokenizer: Any, num_prompts: int, max_documents: int = MAX_DOCUMENTS
) -> list[Prompt]:
    """Every fourth needs two documents."""
    rng = random.Random(24)
    prompts = []
    for number in range(num_prompts):
        kind = TWO if number % _TWO_DOCUMENTS_EVERY == _TWO_DOCUMENTS_EVERY - 1 else ONE
        world = _World(rng)
        question, begun, fact = (_ask_two if kind == TWO else _ask_one)(world, rng)
        num_documents = rng.randint(MIN_DOCUMENTS, max_documents)
        while len(world.documents) < num_documents:
            other = rng.choice(_KINDS)
            world.describe(other, world.name(other))
        rng.shuffle(world.documents)
        documents = [_tokens(tokenizer, f"Document:\n{each}\n\n") for each in world.documents]
        end = f"Question: {question}\nAnswer: {begun}"
        head = _tokens(tokenizer, _HEADS[kind])
        prompts.append(_join(kind, head, documents, _tokens(tokenizer, end), fact))
    return prompts


def _ask_one(world: _World, rng: random.Random) -> tuple[str, str, str]:
    kind = rng.choice(_KINDS)
    name = world.name(kind)
    facts = world.describe(kind, name)
    what = rng.choice(sorted(kind.questions))
    question, begun = kind.questions[what]
    return question.format(name=name), begun.format(name=name), facts[what]


def _ask_two(world: _World, rng: random.Random) -> tuple[str, str, str]:
    first = rng.choice((_PERSON, _MACHINE))
    name, town = world.name(first), world.name(_TOWN)
    world.describe(first, name, town)
    facts = world.describe(_TOWN, town)
    where, begun = first.questions["town"]
    what = rng.choice(sorted(_TOWN.questions))
    about_town = _TOWN.questions[what][0].format(name="this town")
    question = f"{where.removesuffix('?')}, and {about_town[0].lower()}{about_town[1:]}"
    return question.format(name=name), begun.format(name=name), facts[what]


def passage_prompts(
    tokenizer: Any, num_prompts: int, max_documents: int = MAX_DOCUMENTS
) -> list[Prompt]:
    rng = random.Random(42)
    paths = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
    longest = _MAX_PASSAGE + _BEGUN_TOKENS + CONTINUATION_TOKENS
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    pages = [_tokens(tokenizer, text) for text in texts]
    pages = [page for page in pages if len(page) > 2 * longest]
    head = _tokens(tokenizer, "Here are some parts of a manual, in no order.\n\n")
    gap = _tokens(tokenizer, "\n\n---\n\n")
    prompts = []
    for _ in range(num_prompts):
        num_documents = rng.randint(MIN_DOCUMENTS, max_documents)
        chosen = rng.sample(pages, num_documents)
        followed = rng.randrange(num_documents)
        documents = []
        end: list[int] = []
        continuation: list[int] = []
        for number, page in enumerate(chosen):
            length = rng.randint(_MIN_PASSAGE, _MAX_PASSAGE)
            start = rng.randrange(len(page) - longest)
            documents.append(page[start : start + length] + gap)
            if number == followed:
                at = start + length
                end = page[at : at + _BEGUN_TOKENS]
                continuation = page[at + _BEGUN_TOKENS : at + _BEGUN_TOKENS + CONTINUATION_TOKENS]
        prompts.append(_join(PASSAGES, head, documents, end, "", continuation))
    return prompts


def _join(
    kind: str,
    head: Sequence[int],
    documents: Sequence[Sequence[int]],
    end: Sequence[int],
    fact: str,
    continuation: Sequence[int] = (),
) -> Prompt:
    tokens = list(head)
    segments = []
    for document in documents:
        segments.append((len(tokens), len(tokens) + len(document)))
        tokens += document
    return Prompt(kind, (*tokens, *end), tuple(segments), fact, tuple(continuation))


def digest(prompts: Sequence[Prompt]) -> str:
    text = repr([(each.tokens, each.segments, each.fact, each.continuation) for each in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens
