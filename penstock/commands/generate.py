"""`penstock generate`: complete one prompt with the embedded engine."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands import JsonFlag, print_json
from penstock.commands.engine_arguments import EngineArguments, Model, with_engine
from penstock.config.options import EMBEDDED
from penstock.errors import ConfigError
from penstock.install import ENGINE, require
from penstock.units import counted

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

EXAMPLE = (
    'Example: penstock generate "The capital of France is" --temperature 0\n\n'
    "Example: penstock generate - --disk-path kv < story.txt"
)

MaxTokens = Annotated[
    int, typer.Option(min=1, metavar="N", help="Maximum number of output tokens.")
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0, max=2, metavar="T", help="Sampling temperature. 0 always picks the likeliest token."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="SEED", help="Random seed. The same seed gives the same output."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text. May be repeated."),
]


@with_engine
def generate(
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help='The prompt text; "-" reads it from stdin.'),
    ],
    model: Model = EMBEDDED,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    as_json: JsonFlag = False,
    *,
    engine: EngineArguments,
) -> None:
    """Complete a prompt. The output streams to stdout; statistics go to stderr.

    With --disk-path, the KV of the prompt is kept and loaded next time instead of recomputed.
    """
    from penstock.engine.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or ()
    )
    text = check_text(_read_stdin() if prompt == "-" else prompt)
    if not text:
        raise ConfigError("the prompt is empty: expected some text")

    def write(_: int, new: str) -> None:
        sys.stdout.write(new)
        sys.stdout.flush()

    with open_llm(model, engine) as llm:
        started = time.monotonic()
        (output,) = llm.generate(text, params, on_text=None if as_json else write)
        seconds = time.monotonic() - started
    completion, metrics = output.outputs[0], output.metrics
    first = metrics.first_token_seconds if metrics is not None else None
    facts = {
        "model": model,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "completion_tokens": len(completion.token_ids),
        "first_token_seconds": first,
        "seconds": seconds,
    }
    if as_json:
        print_json(facts)
        return
    sys.stdout.write("\n")
    tell(
        f"{counted(len(completion.token_ids), 'token')} in {seconds:.2f} s "
        f"({len(completion.token_ids) / max(seconds, 1e-9):.1f} tokens/s), first token after "
        f"{first or 0.0:.2f} s; {output.num_cached_tokens:,} of "
        f"{counted(len(output.prompt_token_ids), 'prompt token')} from the cache"
    )


def open_llm(model: str, engine: EngineArguments) -> LLM:
    """Open the embedded engine, with the index of the disk tier loaded."""
    require("engine", ENGINE)
    tiers = engine.tiers(model)
    tell("starting the engine")
    from penstock.engine.llm import LLM

    llm = LLM(model, config=tiers, progress=tell, **engine.given)
    opened = llm.engine.offloader
    if tiers is not None and tiers.node.url is None and tiers.disk.path and opened is not None:
        tell(f"reading the index of {tiers.disk.path}")
        opened.recover()
    return llm


def check_text(text: str) -> str:
    """Raise ConfigError if text is not valid UTF-8: Python then has lone surrogates in it."""
    try:
        text.encode()
    except UnicodeError:
        raise ConfigError("the prompt is not valid text: expected UTF-8; convert it") from None
    return text


def _read_stdin() -> str:
    return sys.stdin.buffer.read().decode(errors="surrogateescape")


def tell(text: str) -> None:
    typer.secho(f"penstock: {text}", err=True, dim=True)
