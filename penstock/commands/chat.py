"""`penstock chat`: chat with a model in the terminal."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, suppress
from typing import Annotated

import typer

from penstock.commands.engine_arguments import EngineArguments, with_engine
from penstock.commands.generate import MaxTokens, Seed, Temperature, check_text, open_llm, tell
from penstock.commands.speakers import Embedded, Figures, Remote, Speaker, Wishes
from penstock.config import ENV_API_KEY
from penstock.config.options import EMBEDDED
from penstock.errors import ConfigError, PenstockError
from penstock.units import counted

EXAMPLE = (
    "Example: penstock chat --disk-path kv\n\nExample: penstock chat --url http://127.0.0.1:8000"
)
_HELP = "/clear starts a new chat, /quit or Ctrl-D exits, Ctrl-C stops an answer."


@with_engine
def chat(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use this OpenAI-compatible server instead of loading a model.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=ENV_API_KEY, metavar="KEY", help="API key of the server.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help=f"Model to load, by default {EMBEDDED}. With --url, the model name on the server.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System prompt.", show_default=False),
    ] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per answer, and nothing else.")
    ] = False,
    *,
    engine: EngineArguments,
) -> None:
    """Chat with an embedded model, or with a server. Each line of input is one message.

    /clear starts a new chat, /quit or Ctrl-D exits, Ctrl-C stops an answer.
    """
    wishes = Wishes(max_tokens, temperature, seed)
    with ExitStack() as stack:
        speaker: Speaker
        if url is not None:
            speaker = Remote(url, api_key, model)
        else:
            llm = stack.enter_context(open_llm(model or EMBEDDED, engine))
            speaker = Embedded(llm)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # line editing and history
            tell(f"chatting with {speaker.name}. {_HELP}")
        _Conversation(speaker, wishes, system, as_json).run()


class _Conversation:
    def __init__(self, speaker: Speaker, wishes: Wishes, system: str | None, as_json: bool) -> None:
        self._speaker = speaker
        self._wishes = wishes
        self._as_json = as_json
        self._start = [] if system is None else [{"role": "system", "content": check_text(system)}]
        self._messages = list(self._start)

    def run(self) -> None:
        while (line := _read_line()) is not None:
            command = line.strip()
            match command:
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/clear":
                    self._messages = list(self._start)
                    tell("started a new chat")
                case _ if command.startswith("/"):
                    tell(f"unknown command {command.split()[0]}. {_HELP}")
                case _:
                    self._turn(line)

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        said: list[str] = []
        figures: Figures | None = None
        started = time.monotonic()

        def hear(text: str) -> None:
            said.append(text)
            if not self._as_json:
                sys.stdout.write(text)
                sys.stdout.flush()

        try:
            figures = self._speaker.answer(self._messages, self._wishes, hear)
        except KeyboardInterrupt:
            pass  # keep the text so far as the answer
        except PenstockError as error:
            if not sys.stdin.isatty():
                raise
            self._messages.pop()  # so the user can try again
            tell(str(error))
            return
        self._messages.append({"role": "assistant", "content": "".join(said)})
        self._show("".join(said), figures, time.monotonic() - started)

    def _show(self, text: str, figures: Figures | None, seconds: float) -> None:
        if self._as_json:
            facts: dict[str, object] = {"role": "assistant", "content": text}
            if figures is not None:
                facts["usage"] = {
                    "prompt_tokens": figures.num_prompt_tokens,
                    "cached_tokens": figures.num_cached_tokens,
                    "completion_tokens": figures.num_new_tokens,
                }
            typer.echo(json.dumps({**facts, "seconds": seconds}))
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        if figures is None:
            tell("the answer was stopped")
        else:
            tell(
                f"{counted(figures.num_new_tokens, 'token')} in {seconds:.1f} s; "
                f"{figures.num_cached_tokens:,} of "
                f"{counted(figures.num_prompt_tokens, 'prompt token')} from the cache"
            )


def _read_line() -> str | None:
    """Return the next message; None at the end of input, or at Ctrl-C."""
    try:
        return check_text(input("> " if sys.stdin.isatty() else ""))
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError:
        raise ConfigError("the input is not valid text: expected UTF-8; convert it") from None
