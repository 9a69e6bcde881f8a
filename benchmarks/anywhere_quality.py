"""What reuse anywhere costs: the same prompts, computed in full and with KV of their documents.

    python -m benchmarks.anywhere_quality --questions 300 --passages 60

Each prompt has 4 to 8 short documents in random order. It goes through the engine in full, and then
in each way in which the documents' KV is used where they stand: `none` mends nothing, `link 32`
computes the first 32 tokens of each document where it stands, `blend 15%` the 15% of its tokens
that matter most. Compared with the full computation:
- questions: right answers, greedy answers equal, KL of the distribution of the first answer token,
- passages of documentation: KL over the 32 tokens of text that follow, and how often the likeliest
  token is the same.
KL is that of the whole vocabulary, from the logits that the engine samples from. `prefix` is the
same prompt a second time, with its KV from the ordinary prefix cache: what rounding alone does.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from benchmarks.anywhere_prompts import (
    MAX_DOCUMENTS,
    MIN_DOCUMENTS,
    ONE,
    PASSAGES,
    TWO,
    Prompt,
    digest,
    passage_prompts,
    question_prompts,
)
from penstock.config.options import EMBEDDED
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel, load_model
from penstock.engine.open import default_dtype
from penstock.engine.params import MENDING_MODES, SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.request import Request
from penstock.engine.scheduler import Chunk

BLOCK_TOKENS = 16
ANSWER_TOKENS = 24
FULL, PREFIX = "full", "prefix"
WAYS = "none,link:8,link:16,link:32,link:64,blend:0.05,blend:0.15,blend:0.3"
_POOL_TOKENS = 32_768  # enough for all ways of the longest prompt, so that documents stay


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a prompt."""

    name: str
    mending: dict[str, object] | None = None  # None: without segments


@dataclass(slots=True)
class Quality:
    """The results of one way, for each prompt in order."""

    way: str
    kinds: list[str] = field(default_factory=list)
    is_right: list[bool] = field(default_factory=list)  # False for passages
    is_equal: list[bool] = field(default_factory=list)  # answer, or all likeliest tokens
    first_kl: list[float] = field(default_factory=list)  # at the first token after the prompt
    mean_kl: list[float] = field(default_factory=list)  # of passages, over their continuation
    same_likeliest: list[float] = field(default_factory=list)  # of passages: share of tokens
    prompt_tokens: list[int] = field(default_factory=list)
    reused_tokens: list[int] = field(default_factory=list)
    mended_tokens: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def num_right(self, kind: str) -> int:
        return sum(
            right for right, each in zip(self.is_right, self.kinds, strict=True) if each == kind
        )

    def num_equal(self) -> int:
        """Of questions."""
        return sum(
            equal for equal, kind in zip(self.is_equal, self.kinds, strict=True) if kind != PASSAGES
        )

    def question_kl(self) -> list[float]:
        return [kl for kl, kind in zip(self.first_kl, self.kinds, strict=True) if kind != PASSAGES]

    def share(self, tokens: Sequence[int]) -> float:
        return sum(tokens) / max(1, sum(self.prompt_tokens))


@dataclass(frozen=True, slots=True)
class Answer:
    request: Request
    text: str  # up to the end of the line
    logs: Tensor  # log probabilities: [tokens, vocabulary]


class LogitWatch:
    """Keeps the logits that an engine samples from, while it runs one request at a time.

    With `forced` tokens the request generates these instead of its own, so that the distributions
    after the same text can be compared.
    """

    def __init__(self, engine: Engine) -> None:
        self._run: Callable[..., Tensor] = engine.runner.run
        self.rows: list[Tensor] = []
        self.forced: Sequence[int] = ()
        setattr(engine.runner, "run", self.run)  # noqa: B010 (a method)

    def run(
        self, chunks: Sequence[Chunk], between_layers: Callable[[], None] = lambda: None
    ) -> Tensor:
        logits = self._run(chunks, between_layers)
        if not len(logits):  # a piece of a prompt, or a segment that is computed by itself
            return logits
        if len(logits) != 1:
            raise RuntimeError(f"{len(logits)} requests sample in one step; expected 1")
        self.rows.append(logits[0].clone())
        if self.forced:
            token = self.forced[len(self.rows) - 1]
            logits = torch.zeros_like(logits)
            logits[0, token] = 1.0
        return logits


class Asker:
    def __init__(self, loaded: LoadedModel) -> None:
        token_values = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim
        pool_bytes = token_values * loaded.dtype.itemsize * _POOL_TOKENS
        self.engine = Engine(loaded, EngineConfig(pool_bytes, BLOCK_TOKENS))
        self._watch = LogitWatch(self.engine)
        self._num_asked = 0
        # The model would end the answer with the first of its two facts. The distributions that
        # are compared are those before this bias.
        (full_stop,) = loaded.tokenizer(".", add_special_tokens=False)["input_ids"]
        self._never_ends = {full_stop: -100.0}

    def ask(self, prompt: Prompt, way: Way) -> Answer:
        is_forced = bool(prompt.continuation)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(prompt.continuation) or ANSWER_TOKENS,
            stop=None if is_forced else "\n",
            ignore_eos=is_forced,
            logit_bias=self._never_ends if prompt.kind == TWO else None,
            kv_mending=way.mending,
        )
        self._num_asked += 1
        self._watch.rows, self._watch.forced = [], prompt.continuation
        request = self.engine.add(
            f"{self._num_asked}",
            prompt.tokens,
            params,
            segments=prompt.segments if way.mending is not None else (),
        )
        text = ""
        while self.engine.has_work:
            for progress in self.engine.step():
                text += progress.text
        for _, fault in self.engine.take_failed():
            raise fault
        logs = torch.stack(self._watch.rows).double().log_softmax(-1)
        return Answer(request, text.strip(), logs)


def read_prompt(
    asker: Asker, prompt: Prompt, ways: Sequence[Way], qualities: dict[str, Quality]
) -> None:
    """Add one prompt to the results of all ways. The first must be the full computation."""
    full: Answer | None = None
    for way in ways:
        answer = asker.ask(prompt, way)
        full = full or answer
        quality = qualities[way.name]
        quality.kinds.append(prompt.kind)
        quality.is_right.append(is_right(prompt, answer.text))
        first_kl = _kl(full.logs[:1], answer.logs[:1])
        quality.first_kl.append(first_kl.item())
        if prompt.continuation:
            quality.mean_kl.append(_kl(full.logs, answer.logs).mean().item())
            same = full.logs.argmax(-1) == answer.logs.argmax(-1)
            quality.same_likeliest.append(same.double().mean().item())
            quality.is_equal.append(bool(same.all()))
            quality.answers.append("")
        else:
            quality.is_equal.append(answer.text == full.text)
            quality.answers.append(answer.text)
        quality.prompt_tokens.append(len(prompt.tokens))
        quality.reused_tokens.append(answer.request.num_reused_tokens)
        quality.mended_tokens.append(answer.request.num_mended_tokens)


def is_right(prompt: Prompt, text: str) -> bool:
    """Whether an answer has the fact as words of its own. False for passages."""
    return bool(prompt.fact) and re.search(rf"\b{re.escape(prompt.fact)}\b", text) is not None


def _kl(full: Tensor, other: Tensor) -> Tensor:
    """Of each row of log probabilities."""
    return (full.exp() * (full - other)).sum(-1)


def parse_ways(text: str) -> list[Way]:
    """Such as "none,link:32,blend:0.15". Full and prefix come first. Raises ValueError."""
    ways = [Way(FULL), Way(PREFIX)]
    for each in text.split(","):
        mode, _, number = each.strip().partition(":")
        if mode == "none":
            ways.append(Way(mode, {"mode": mode}))
        elif mode == "link":
            ways.append(Way(f"link {int(number)}", {"mode": mode, "link_tokens": int(number)}))
        elif mode == "blend":
            share = float(number)
            ways.append(Way(f"blend {share:.0%}", {"mode": mode, "blend_share": share}))
        else:
            raise ValueError(f"no such way: {each!r}; expected none, link:TOKENS or blend:SHARE")
    known = [way for way in ways if way.mending is None or way.mending["mode"] in MENDING_MODES]
    if left_out := [way.name for way in ways if way not in known]:
        _say(f"left out, because the engine does not have them: {', '.join(left_out)}")
    return known


def table(qualities: Sequence[Quality]) -> str:
    """As Markdown, for docs/anywhere.md."""
    full = qualities[0]
    lines = [
        "| way | right, one document | right, two documents | lost, gained | answers equal | KL of "
        "the first answer token, mean (worst) | KL of passages, mean (worst prompt) | same "
        "likeliest token | reused | mended | computed in all |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in qualities:
        pairs = list(zip(full.is_right, each.is_right, strict=True))
        lost, gained = pairs.count((True, False)), pairs.count((False, True))
        num_questions = len(each.kinds) - each.kinds.count(PASSAGES)
        reused = each.share(each.reused_tokens)
        lines.append(
            f"| {each.way} | {_of(each.num_right(ONE), each.kinds.count(ONE))} | "
            f"{_of(each.num_right(TWO), each.kinds.count(TWO))} | {lost}, {gained} | "
            f"{_of(each.num_equal(), num_questions)} | {_mean_and_worst(each.question_kl())} | "
            f"{_mean_and_worst(each.mean_kl)} | {_mean(each.same_likeliest):.1%} | {reused:.0%} | "
            f"{each.share(each.mended_tokens):.0%} | {1 - reused:.0%} |"
        )
    return "\n".join(lines)


def _of(num: int, num_all: int) -> str:
    return f"{num} of {num_all} ({num / num_all:.0%})" if num_all else "none asked"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _mean_and_worst(values: Sequence[float]) -> str:
    return f"{_mean(values):.2g} ({max(values, default=math.nan):.2g})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.anywhere_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=EMBEDDED, help="folder with weights, or %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="of weights and KV; float32 by default where the device has no bfloat16",
    )
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--passages", type=int, default=60, help="texts to continue")
    parser.add_argument(
        "--max-documents",
        type=int,
        default=MAX_DOCUMENTS,
        choices=range(MIN_DOCUMENTS, MAX_DOCUMENTS + 1),
        help="in a prompt, for a slow machine",
    )
    parser.add_argument(
        "--ways",
        default=WAYS,
        help="comma-separated, beside the full computation: none, link:TOKENS or blend:SHARE; "
        "default %(default)s",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the prompts, and the device"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a job: I/N
    parser.add_argument("--json", action="store_true", help="JSON with each prompt's results")
    options = parser.parse_args(arguments)
    try:
        options.ways = parse_ways(options.ways)
    except ValueError as error:
        parser.error(str(error))
    options.dtype = options.dtype or default_dtype(options.device)
    return options


def measure_in_jobs(num_jobs: int) -> tuple[dict[str, Any], list[Quality]]:
    """The results of several processes, each with a part of the prompts."""
    command = [sys.executable, "-m", "benchmarks.anywhere_quality", *sys.argv[1:], "--json"]
    jobs = [
        subprocess.Popen([*command, "--part", f"{part}/{num_jobs}"], stdout=subprocess.PIPE)
        for part in range(num_jobs)
    ]
    answers = [json.loads(job.communicate()[0] or "null") for job in jobs]
    if None in answers:
        raise SystemExit("a job has failed, see above")
    rows = [answer.pop("results") for answer in answers]
    results = [Quality(row["way"]) for row in rows[0]]
    for part in rows:
        for quality, row in zip(results, part, strict=True):
            for each in fields(Quality):
                if each.name != "way":
                    getattr(quality, each.name).extend(row[each.name])
    return answers[0], results


def measure(
    options: argparse.Namespace, loaded: LoadedModel | None = None
) -> tuple[dict[str, Any], list[Quality]]:
    """`loaded`: a model to measure instead of the options' one."""
    if loaded is None:
        loaded = load_model(options.model, dtype=options.dtype, device=options.device)
    prompts = [
        *question_prompts(loaded.tokenizer, options.questions, options.max_documents),
        *passage_prompts(loaded.tokenizer, options.passages, options.max_documents),
    ]
    about = {
        "model": loaded.name.rstrip("/").rsplit("/", 1)[-1],
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "block_tokens": BLOCK_TOKENS,
        "num_questions": options.questions,
        "num_passages": options.passages,
        "prompt_tokens": [len(prompt.tokens) for prompt in prompts],
        "document_tokens": [end - start for each in prompts for start, end in each.segments],
        "digest": digest(prompts),
    }
    _say(f"{len(prompts)} prompts, digest {about['digest']}")
    qualities = {way.name: Quality(way.name) for way in options.ways}
    part, num_parts = map(int, (options.part or "0/1").split("/"))
    mine = prompts[part::num_parts]
    asker = Asker(loaded)
    started = said = time.monotonic()
    for number, prompt in enumerate(mine, 1):
        read_prompt(asker, prompt, options.ways, qualities)
        now = time.monotonic()
        if now - said > 10 or number == len(mine):
            said = now
            so_far = ", ".join(
                f"{each.way} {sum(each.is_right)} {_mean(each.first_kl):.2g}"
                for each in qualities.values()
            )
            seconds = now - started
            _say(f"{number} of {len(mine)}, {seconds:.0f} s; right, mean first KL: {so_far}")
    asker.engine.close()
    return about, list(qualities.values())


def show(options: argparse.Namespace, about: dict[str, Any], results: list[Quality]) -> None:
    if options.json:
        print(json.dumps({**about, "results": [asdict(each) for each in results]}))
        return
    lengths, documents = about["prompt_tokens"], about["document_tokens"]
    if lengths:
        print(
            f"{about['num_questions']} questions and {about['num_passages']} passages; prompts of "
            f"{min(lengths)} to {max(lengths)} tokens with documents of {min(documents)} to "
            f"{max(documents)}, in blocks of {about['block_tokens']} tokens; {about['model']} in "
            f"{about['dtype']}, {about['device']}, torch {about['torch']}, Python "
            f"{about['python']}, digest {about['digest']}\n"
        )
    print(table(results))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.jobs > 1 and options.part is None:
        about, results = measure_in_jobs(options.jobs)
    else:
        about, results = measure(options)
    show(options, about, results)


if __name__ == "__main__":
    main()
