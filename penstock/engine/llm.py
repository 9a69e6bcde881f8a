"""`LLM`: vLLM's offline API over the embedded engine.

from penstock import LLM, SamplingParams

llm = LLM("smollm2-135m", kv_offloading_size=4, disk_path="kv", disk_size=16)
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, cast

from penstock.config import Config
from penstock.config.options import EMBEDDED, EngineOptions
from penstock.engine.anywhere.conversations import read_message, render_pieces
from penstock.engine.anywhere.pieces import (
    PromptPiece,
    PromptTokens,
    is_one_text,
    put_around,
    read_segments,
    special_ids,
    split_text,
    text_of,
    tokenize,
)
from penstock.engine.engine import Progress
from penstock.engine.interrupts import InterruptGuard
from penstock.engine.open import open_engine
from penstock.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.sampler import Sampled
from penstock.errors import ConfigError, PenstockError
from penstock.hints import Hint
from penstock.units import counted

Prompt = str | list[int] | dict[str, Any]


class LLM:
    """vLLM's offline API: a model, its device pool, and the tiers below it."""

    def __init__(
        self,
        model: str = EMBEDDED,
        *,
        config: Config | None = None,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Load `model` and open the tiers.

        Options are the fields of `EngineOptions`, with vLLM's names; sizes are in GiB.
        `kv_offloading_size=0` turns offloading off. `config` overrides the options about tiers.
        """
        known = {field.name for field in fields(EngineOptions)}
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                options_text = f"expected one of {', '.join(sorted(known))}."
                advice = f"did you mean {close[0]}?" if close else options_text
                raise ConfigError(f"LLM has no option {name!r}: {advice}")
        # The caller waits for all outputs anyway, so the queue has no limit.
        wanted = EngineOptions(model, **{"max_waiting": 1 << 30, **options})
        self.engine = open_engine(wanted, config, progress=progress)
        self._separator = wanted.segment_separator
        self._num_calls = 0
        self._interrupts = InterruptGuard()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, token ids, or {"segments": [...]} (see docs/anywhere.md).

        Outputs are in the order of the prompts.

        `on_text(prompt_number, text)` is called with new text as it is generated; use it with n=1.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._generate(encoded, sampling_params, priority=priority, on_text=on_text)

    def _generate(
        self,
        prompts: Sequence[_Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: Sequence[int] | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ConfigError(
                f"{len(sampling_params)} sampling_params for {counted(len(prompts), 'prompt')}: "
                "expected one SamplingParams for all prompts, or one for each."
            )
        return self._run(prompts, sampling_params, priority or [0] * len(prompts), on_text)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete one conversation, or several, in OpenAI's message format.

        `tools` are shown to the model by its chat template. Calls are part of the text.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self._encode_chat(each, tools) for each in conversations]
        return self._generate(prompts, sampling_params, **options)

    def hint(
        self,
        action: str,
        *,
        session: str | None = None,
        prompt: Prompt | None = None,
        retain_seconds: float | None = None,
    ) -> int:
        """Retain, demote, prefetch or release the KV of a session or prompt; see docs/hints.md.

        Returns the number of tokens affected. A prefetch has finished when this returns.
        """
        if (session is None) == (prompt is None):
            given = "neither is" if session is None else "both are"
            raise ConfigError(f"a hint takes either a session or a prompt: {given} given.")
        tokens = PromptTokens([]) if prompt is None else self._encode(prompt).tokens
        self._require_intact()
        with self._interrupts.deferred():
            num_blocks = self.engine.hint(
                Hint(action, session, retain_seconds), tokens.ids, segments=tokens.segments
            )
        offloader = self.engine.offloader
        while offloader is not None and offloader.is_prefetching:
            with self._interrupts.deferred():
                self.engine.step()
                offloader.pause(0.002)
        return num_blocks * self.engine.block_tokens

    def close(self) -> None:
        """Finish pending saves and release all memory. KV on disk stays for the next start."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> _Encoded:
        if isinstance(prompt, dict):
            if "segments" in prompt:
                return self._encode_pieces(read_segments(prompt["segments"]))
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
        if isinstance(prompt, str):
            return self._encode_pieces(split_text(prompt, self._separator))
        return _Encoded(None, PromptTokens(list(prompt)))

    def _encode_pieces(self, pieces: Sequence[PromptPiece]) -> _Encoded:
        tokenizer = self.engine.loaded.tokenizer
        if is_one_text(pieces):
            text = text_of(pieces)
            return _Encoded(text, PromptTokens(tokenizer(text)["input_ids"]))
        has_ids = any(not isinstance(piece.content, str) for piece in pieces)
        tokens = put_around(tokenize(tokenizer, pieces), *special_ids(tokenizer, pieces))
        return _Encoded(None if has_ids else text_of(pieces), tokens)

    def _encode_chat(
        self, messages: Sequence[Any], tools: Sequence[dict[str, Any]] | None
    ) -> _Encoded:
        tokenizer = self.engine.loaded.tokenizer

        def render(each: list[dict[str, Any]]) -> str:
            text = tokenizer.apply_chat_template(
                each, tools=tools, add_generation_prompt=True, tokenize=False
            )
            return cast(str, text)

        read = [read_message(each) for each in messages]
        return _Encoded(None, tokenize(tokenizer, render_pieces(read, render, self._separator)))

    def _run(
        self,
        prompts: Sequence[_Encoded],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        on_text: Callable[[int, str], None] | None,
    ) -> list[RequestOutput]:
        self._require_intact()
        self._num_calls += 1
        results: dict[str, _Result] = {}
        groups: list[list[_Result]] = []
        try:
            for number, (_, tokens) in enumerate(prompts):
                group = []
                for index in range(params[number].n):
                    name = f"{self._num_calls}-{number}-{index}"
                    with self._interrupts.deferred():
                        request = self.engine.add(
                            name,
                            tokens.ids,
                            params[number],
                            priority=priorities[number],
                            index=index,
                            segments=tokens.segments,
                        )
                        results[name] = _Result(number, request)
                    group.append(results[name])
                groups.append(group)
            while any(result.request.finish_reason is None for result in results.values()):
                with self._interrupts.deferred():
                    progresses = self.engine.step()
                for _, fault in self.engine.take_failed():
                    raise fault
                for progress in progresses:
                    result = results[progress.request.id]
                    result.progress.append(progress)
                    if on_text is not None and progress.text:
                        on_text(result.number, progress.text)
            for result in results.values():
                for progress in result.progress:
                    _ = progress.text
                    if progress.error is not None:
                        raise progress.error
        except BaseException:
            if not self._interrupts.is_broken:
                with self._interrupts.deferred():
                    for name in results:
                        self.engine.abort(name)
                    self.engine.take_failed()  # drop other failures of the same step
            raise
        return [
            self._output(f"{self._num_calls}-{number}", prompts[number], group)
            for number, group in enumerate(groups)
        ]

    def _require_intact(self) -> None:
        if self._interrupts.is_broken:
            raise PenstockError(
                "this LLM was interrupted twice during one step, so its state may be "
                "inconsistent: close it and make another. KV on disk is safe: it is verified when "
                "it is read."
            )

    def _output(self, name: str, prompt: _Encoded, group: Sequence[_Result]) -> RequestOutput:
        first = group[0].request
        metrics = RequestMetrics(
            arrival_time=first.arrival,
            first_token_time=first.first_token_time,
            finished_time=max(result.request.finished_time or 0.0 for result in group),
            num_preemptions=sum(result.request.num_preemptions for result in group),
            num_loaded_tokens=sum(result.request.num_loaded_tokens for result in group),
            num_lossy_tokens=sum(
                min(result.request.num_lossy_tokens, len(result.request.tokens)) for result in group
            ),
        )
        outputs = [
            result.completion(index, self.engine.loaded.tokenizer)
            for index, result in enumerate(group)
        ]
        return RequestOutput(
            request_id=name,
            prompt=prompt.text,
            prompt_token_ids=prompt.tokens.ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
            num_reused_tokens=first.num_reused_tokens,
            num_mended_tokens=first.num_mended_tokens,
            metrics=metrics,
        )


class _Encoded(NamedTuple):
    text: str | None  # None if it is not known
    tokens: PromptTokens


class _Result:
    """The output of one sequence so far."""

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.progress: list[Progress] = []

    def completion(self, index: int, tokenizer: Any) -> CompletionOutput:
        logprobs = None
        cumulative = None
        if self.request.params.logprobs is not None:
            logprobs = [_logprobs(progress.sampled, tokenizer) for progress in self.progress]
            cumulative = sum(progress.sampled.logprob or 0.0 for progress in self.progress)
        return CompletionOutput(
            index=index,
            text="".join(progress.text for progress in self.progress),
            token_ids=list(self.request.output_ids),
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=self.request.finish_reason,
            stop_reason=self.request.stop_reason,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("list[int]", prompts)]
    return cast("list[Prompt]", list(prompts))


def _logprobs(sampled: Sampled, tokenizer: Any) -> dict[int, Logprob]:
    found = {
        token_id: Logprob(logprob, rank, tokenizer.decode([token_id]))
        for rank, (token_id, logprob) in enumerate(sampled.top, 1)
    }
    if sampled.token_id not in found:
        text = tokenizer.decode([sampled.token_id])
        found[sampled.token_id] = Logprob(sampled.logprob or 0.0, None, text)
    return found
