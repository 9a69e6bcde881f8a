"""Prompts for `codec_quality`: real text that every machine has, and needles in a haystack.

Text comes from this project's documentation, the Python reference (`pydoc_data`) and the source of
Python's standard library. The same checkout and the same Python give the same prompts; `digest`
says whether two runs had the same.
"""

from __future__ import annotations

import hashlib
import math
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

MIN_TOKENS, MAX_TOKENS = 256, 7000
CONTINUATION_TOKENS = 64
NEEDLE_TOKENS = (500, 1000, 2000, 4000, 6000)
NEEDLES_PER_LENGTH = 8

_ROOT = Path(__file__).parent.parent
_MODULES = (
    *("argparse", "ast", "bdb", "calendar", "cmd", "configparser", "contextlib", "copy", "csv"),
    *("dataclasses", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools"),
    *("heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "optparse"),
    *("pdb", "pickle", "pickletools", "pkgutil", "platform", "pprint", "pydoc", "random"),
    *("selectors", "shutil", "smtplib", "socket", "statistics", "string", "subprocess"),
    *("tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback", "turtle"),
    *("typing", "uuid", "warnings", "weakref"),
)
_CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Madrid", "Tokyo", "Vienna", "Boston")


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    continuation: tuple[int, ...]  # the text that follows


@dataclass(frozen=True, slots=True)
class Needle:
    tokens: tuple[int, ...]
    fact: str  # what the answer must contain


def text_prompts(tokenizer: Any, num_prompts: int) -> list[Prompt]:
    """Lengths from MIN_TOKENS to MAX_TOKENS, equally spaced on a logarithmic scale.

    The sources take turns. Within a source the places are random, so prompts may overlap.
    """
    rng = random.Random(22)
    streams = [_tokens(tokenizer, text) for text in _sources()]
    longest = MAX_TOKENS + CONTINUATION_TOKENS
    streams = [stream for stream in streams if len(stream) > longest]
    ratio = MAX_TOKENS / MIN_TOKENS
    steps = max(num_prompts - 1, 1)
    lengths = [round(MIN_TOKENS * ratio ** (step / steps)) for step in range(num_prompts)]
    rng.shuffle(lengths)
    prompts = []
    for number, length in enumerate(lengths):
        stream = streams[number % len(streams)]
        start = rng.randrange(len(stream) - length - CONTINUATION_TOKENS)
        end = start + length
        continuation = stream[end : end + CONTINUATION_TOKENS]
        prompts.append(Prompt(tuple(stream[start:end]), tuple(continuation)))
    return prompts


def needle_prompts(tokenizer: Any, num_prompts: int) -> list[Needle]:
    """A number and a city in a dull ledger, at different depths; each prompt asks for one."""
    rng = random.Random(7421)
    needles = []
    for case in range(NEEDLES_PER_LENGTH):
        for num_tokens in NEEDLE_TOKENS:
            number, city = str(rng.randrange(1000, 10000)), rng.choice(_CITIES)
            depths = (0.1 + 0.1 * case, 0.9 - 0.1 * case)
            facts = (
                f"The secret number is {number}. Remember it.",
                f"The courier lives in {city}.",
            )
            questions = {
                number: "What is the secret number?",
                city: "Which city does the courier live in?",
            }
            fact = city if case % 2 else number
            text = _haystack(tokenizer, num_tokens, list(zip(depths, facts, strict=True)))
            content = f"Read this.\n{text}\n\n{questions[fact]}"
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            needles.append(Needle(tuple(_tokens(tokenizer, chat)), fact))
    return needles[:num_prompts]


def digest(prompts: Sequence[Prompt | Needle]) -> str:
    text = repr([prompt.tokens for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _haystack(tokenizer: Any, num_tokens: int, needles: Sequence[tuple[float, str]]) -> str:
    def line(number: int) -> str:
        sacks, hour = number * 37 % 100, number % 12 + 1
        return f"Entry {number}: {sacks} sacks of grain left for the mill at {hour} o'clock."

    # The longest line has the most tokens, so the text is at most as long as was asked.
    line_tokens = len(_tokens(tokenizer, line(num_tokens) + "\n"))
    lines = [line(number) for number in range(math.floor(num_tokens / line_tokens))]
    for depth, needle in sorted(needles, reverse=True):
        lines.insert(int(depth * len(lines)), needle)
    return "\n".join(lines)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens


def _sources() -> list[str]:
    pages = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted((_ROOT / "docs").glob("*.md"))]
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = [library / f"{name}.py" for name in _MODULES]
    return ["\n\n".join(map(_read, pages)), _reference(), "\n\n".join(map(_read, modules))]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _reference() -> str:
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError:  # some systems package it separately
        return ""
    return "\n\n".join(topics[name] for name in sorted(topics))
