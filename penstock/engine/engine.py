"""The engine: requests in, tokens out, one `step` at a time.

    engine.add("a", prompt_ids, params)
    while engine.has_work:
        for progress in engine.step(): ...

One thread owns an engine. A step settles loads and saves that have ended, lets the scheduler choose
the next tokens, computes them, and samples. On a GPU the tokens are read when the next step has
been launched (see `ahead`). A tier that fails never fails a request. If a step
fails because of a defect, the requests that it computed fail (see `take_failed`), the books are
rebuilt, and all other requests are computed again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NoReturn

import torch

from penstock.books.sessions import Chain
from penstock.config import Config
from penstock.engine.admission import Busy, NoRoom, TooLong
from penstock.engine.ahead import Ahead, LaunchedStep
from penstock.engine.anywhere.blending import look_at
from penstock.engine.anywhere.segments import cut_at_segments, find_segments
from penstock.engine.anywhere.turning import Turner
from penstock.engine.census import Sighting, take_census
from penstock.engine.detokenize import Detokenizer
from penstock.engine.faults import (
    MAX_FAULTS_IN_A_ROW,
    MAX_REQUEUES,
    EngineFault,
    EngineLost,
    GrammarFault,
)
from penstock.engine.grammar import CompiledGrammar, Grammar, Grammars
from penstock.engine.intake import Intake
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig, EngineParts
from penstock.engine.request import Request, RequestPhase
from penstock.engine.sampler import Sampled, SamplerRow, begin_sampling, make_generator
from penstock.engine.scheduler import Chunk
from penstock.engine.story import Story
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.hints import NO_HINTS, Hint
from penstock.keys import KeyChain
from penstock.types import NO_ORIGIN, Done, Origin, Tier

if TYPE_CHECKING:
    from penstock.kv_events.publisher import KvEventPublisher

log = logging.getLogger(__name__)

_HOP_SECONDS = 0.005
_NODE_SETTLES_SECONDS = 5.0  # after it is back
_NODE_PATIENCE_SECONDS = 60.0  # of a request that is larger than the device pool


class Progress:
    """What a step did for one request."""

    __slots__ = ("_on_fault", "_read", "_text", "error", "request", "sampled")

    def __init__(
        self,
        request: Request,
        sampled: Sampled,
        read: Callable[[], str],
        on_fault: Callable[[Request, Exception], EngineFault],
    ) -> None:
        self.request = request
        self.sampled = sampled
        self.error: EngineFault | None = None  # if decoding its text failed
        self._read: Callable[[], str] | None = read
        self._on_fault = on_fault
        self._text = ""

    @property
    def text(self) -> str:
        """The new text. It is decoded on first use, or else in the next step."""
        if self._read is not None:
            read, self._read = self._read, None
            try:
                self._text = read()
            except Exception as error:
                self.error = self._on_fault(self.request, error)
        return self._text


@dataclass(slots=True)
class _Live:
    request: Request
    generator: torch.Generator | None
    detokenizer: Detokenizer
    stop_ids: frozenset[int]
    grammar: Grammar | None = None  # of a structured answer
    row: SamplerRow | None = None  # once it no longer changes
    num_requeues: int = 0  # after faults, since its last token


class Engine(EngineParts):
    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        tiers: Config | None = None,
        observers: tuple[Observer, ...] = (),
        kv_events: KvEventPublisher | None = None,
    ) -> None:
        """Without `tiers` nothing is offloaded: KV that does not fit the pool is recomputed.

        `kv_events` is closed with the engine; its `held` must be one of the observers.
        """
        super().__init__(loaded, config or EngineConfig(), tiers, observers, kv_events)
        self.intake = Intake(loaded.vocab_size)
        self.grammars = Grammars(loaded.tokenizer, loaded.vocab_size, tuple(loaded.eos_token_ids))
        # Ids outside the vocabulary are never sampled, so they need not be suppressed.
        self._eos_ids = tuple(i for i in loaded.eos_token_ids if 0 <= i < loaded.vocab_size)
        self._story = Story(self._block_bytes, self.block_tokens, observers, self._link_bytes)
        self._turner: Turner | None = None  # once a prompt has segments
        self._arrived: list[Done] = []  # while a step was computed
        is_ahead = self._config.launch_ahead
        if is_ahead is None:
            is_ahead = self.device.on_gpu and self.runner.only_queues
        self.ahead: Ahead[_Live] = Ahead(is_on=is_ahead)
        self._progress: list[Progress] = []  # of this step
        self._unread: list[Progress] = []  # of the last step: their text is not decoded
        self._moves_again = 0.0
        self._first_stuck = self._last_stuck = -math.inf  # when a request was stuck at a node
        self._live: dict[str, _Live] = {}
        self._sequence = count()
        self._chunks: Sequence[Chunk] = ()  # that fail if something does now
        self._undecodable: dict[str, EngineFault] = {}  # requests whose text cannot be decoded
        self._failed: list[tuple[Request, EngineFault]] = []
        self._num_faults = 0  # in a row
        self._is_lost = False

    @property
    def has_work(self) -> bool:
        is_unread = self.ahead.unread is not None or bool(self._progress)
        return is_unread or self.scheduler.has_work

    @property
    def is_moving(self) -> bool:
        """Whether KV is moving between tiers. If so, `step` must be called."""
        if self.audits is not None and self.audits.is_busy:
            return True
        return self.offloader is not None and self.offloader.is_moving

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        index: int = 0,
        origin: Origin = NO_ORIGIN,
        segments: Sequence[tuple[int, int]] = (),
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """Queue a request. `segments`: parts of the prompt, as the tokens at which each begins and
        ends, whose KV may be used wherever they stand (docs/anywhere.md). `grammar`: that of
        `params.structured_outputs`, if it is already compiled; it must not be given without.

        Raises ConfigError or TooLong if it can never be served, Busy if the queue is full,
        EngineFault if the engine failed, and EngineLost if it could not recover.
        """
        self._require_not_lost()
        if request_id in self._live:
            raise ConfigError(
                f"a request with the id {request_id!r} has not ended: give each its own id"
            )
        prompt_ids = self.intake.check(prompt_ids, params, priority=priority, tenant=tenant)
        try:
            max_new = self._max_new(len(prompt_ids), params)
        except (TooLong, Busy) as refusal:
            room = "no_room" if isinstance(refusal, NoRoom) else "too_long"
            self._story.refused("busy" if isinstance(refusal, Busy) else room)
            raise
        if grammar is not None and params.structure is None:
            # Else the next step would be queued before the grammar knows the last token.
            raise ConfigError(
                "grammar is given without params.structured_outputs: expected both, or only the "
                "latter; set structured_outputs to what the grammar was compiled from."
            )
        if grammar is None and params.structure is not None:
            grammar = self.grammars.compile(params.structure)
        min_new = min(params.min_tokens, max_new)
        params = replace(params, max_tokens=max_new, min_tokens=min_new)
        namespace = replace(self.namespace, tenant=tenant)
        found = find_segments(prompt_ids, segments, params.mending, namespace)
        if found:
            self._prepare_turner()
        state = None if grammar is None else grammar.fork()
        request = Request(
            request_id,
            prompt_ids,
            params,
            KeyChain(namespace),
            priority=priority,
            tenant=tenant,
            origin=origin,
            max_total_tokens=len(prompt_ids) + max_new,
            arrival=time.monotonic(),
            sequence=next(self._sequence),
            segments=found,
        )
        if state is not None:
            request.is_ready = state.is_ready
        live = _Live(
            request,
            make_generator(params.seed, index),
            Detokenizer(self.loaded.tokenizer, list(prompt_ids), params),
            frozenset(params.stop_ids),
            state,
        )
        try:
            self.scheduler.add(request)
            if self.sessions is not None:
                self.sessions.began(params.hints, tenant)
        except Exception as error:
            self._recover(error)
            raise EngineFault.of(error) from error
        self._live[request_id] = live
        return request

    def hint(
        self,
        hint: Hint,
        prompt_ids: Sequence[int] = (),
        *,
        tenant: str = "",
        segments: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Apply a hint to its session or, if it names none, to a prompt and its `segments`, each of
        which is also a prompt of its own (see `add`).

        Returns the number of blocks; 0 if nothing is offloaded, or session or prompt are unknown.
        """
        self._require_not_lost()
        if self.sessions is None:
            return 0
        self.intake.check_tenant(tenant)
        ids = self.intake.check_prompt(prompt_ids)
        namespace = replace(self.namespace, tenant=tenant)
        parts = cut_at_segments(ids, segments, namespace, self.loaded.max_tokens)
        if self._announcer is not None:
            for tokens, keys in parts:
                self._announcer.hinted(keys, tokens, tenant)
        try:
            return self.sessions.apply(hint, [Chain(keys) for _, keys in parts], tenant)
        except Exception as error:
            self._recover(error)
            raise EngineFault.of(error) from error

    def census(self) -> list[Sighting]:
        """All sequences: first running, then loading, then waiting ones, each group in order."""
        return take_census(self.scheduler, time.monotonic())

    def abort(self, request_id: str) -> None:
        """Abort a request in any phase. Unknown ids are ignored."""
        live = self._live.pop(request_id, None)
        if live is not None:
            live.request.finish_reason = "abort"
            if self._is_lost:  # there are no books left to update
                return
            try:
                self._end(live.request)
            except Exception as error:
                self._recover(error)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Progress]:
        """Compute one batch. Empty if nothing can run yet or nothing is left to do.

        If the next step is launched ahead, a step returns the tokens of the one before it.
        `meanwhile` does the caller's work between steps. It is called at least once, on a GPU
        during the computation, and must not raise. Raises EngineLost if the engine fails and
        cannot recover; after a fault that it recovers from, see `take_failed`.
        """
        try:
            self._step(meanwhile)
        except Exception as error:
            self._recover(error, meanwhile)
        else:
            self._num_faults = 0
        finally:
            self._chunks = ()
        progress, self._progress = self._progress, []
        self._unread += progress
        return progress

    def take_failed(self) -> list[tuple[Request, EngineFault]]:
        """Requests that have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _step(self, meanwhile: Callable[[], None]) -> None:
        self._end_undecodable()
        self._settle()
        self._wait_for_masks()
        chunks = self._chunks = self.scheduler.schedule()
        self._story.entered(self.scheduler, time.monotonic())
        self._story.scheduled(self.scheduler, self.pool)
        self._end_stuck()
        if chunks and (self.scheduler.is_looking or not self.ahead.may_follow(chunks)):
            self._read_step()
            chunks = [each for each in chunks if each.request.phase is RequestPhase.RUNNING]
            self._chunks = chunks
        if not chunks:
            self._catch_up(meanwhile)
            was_unread = self.ahead.unread is not None
            self._read_step()
            if self._place_segments():
                self.runner.wait()  # before the next step frees what was copied
            elif not was_unread and self.scheduler.has_work:
                # Leave the CPU to loads and masks.
                (time.sleep if self.offloader is None else self.offloader.pause)(0.002)
            return
        if not self.runner.only_queues:
            self._catch_up(meanwhile)
        step = self._launch(chunks)
        is_behind = self.ahead.unread is not None
        if is_behind:  # it waits on the device behind the one that is not read
            self._catch_up(meanwhile)
            self._read_step()
        if self.runner.is_doubtful:  # what it computed must not be named or saved if it is wrong
            self._catch_up(meanwhile)
            self.runner.wait(self._keep_moving, step.end)
        self.ahead.unread = step
        # On a GPU the step is only queued: update the books while it runs. Saves are queued after
        # it.
        self.scheduler.computed(chunks)
        if self.runner.only_queues and not is_behind:
            self._catch_up(meanwhile)
        if not step.is_left:
            self._read_step()

    def _wait_for_masks(self) -> None:
        """Wait a little, so that sequences seldom sit out."""
        patience = self.grammars.mask_threads.patience()
        for live in self._live.values():
            if live.grammar is not None:
                live.grammar.wait(patience)

    def _launch(self, chunks: Sequence[Chunk]) -> LaunchedStep[_Live]:
        started = time.monotonic()
        looks = self.scheduler.is_looking  # which may read DRAM, so it is not left behind
        self._place_segments()
        num_brought = sum(len(chunk.request.table.arriving_pins) for chunk in chunks)
        logits = self.runner.run(chunks, self._keep_moving)
        lives = [self._live[chunk.request.id] for chunk in chunks if chunk.samples]
        read = begin_sampling(logits, [self._row(live) for live in lives], self.runner.post)
        is_left = not looks and self.ahead.may_leave(chunks)  # before `queued` takes what arrives
        step = LaunchedStep(
            chunks, lives, read, self.runner.mark(), started, is_left, looks, num_brought
        )
        self.ahead.launched(step, [live.request for live in lives])
        self.scheduler.queued(chunks)
        return step

    def _read_step(self, *, is_rescue: bool = False) -> None:
        """Wait for the step that is not read yet, if there is one, and enter its tokens.

        In a rescue the books are lost: requests that end are not entered there.
        """
        step, self.ahead.unread = self.ahead.unread, None
        if step is None:
            return
        # If this fails, a step that was launched after it has failed too.
        later, self._chunks = self._chunks, [*step.chunks, *self._chunks]
        self.runner.wait(self._keep_moving, step.end)
        seconds = self.ahead.ended(step, time.monotonic())
        if not is_rescue:
            self.scheduler.brought_loads.ended()
        if not (step.looks or step.num_brought):
            computed = [(c.num_tokens, c.end - c.num_tokens) for c in step.chunks]
            self._costs.observe(computed, seconds)
        link = None if self.offloader is None else self.offloader.rates.get(Tier.HOST)
        self._story.stepped(step.chunks, seconds, link, step.num_brought)
        for live, sampled in zip(step.owners, step.read(), strict=True):
            if live.request.finish_reason is not None:
                continue  # it was aborted meanwhile
            self._progress.append(self._take(live, sampled))
            if live.request.finish_reason is not None:
                del self._live[live.request.id]
                if is_rescue:
                    self._close_story(live.request)
                else:
                    self._end(live.request)
        self._chunks = later

    def _prepare_turner(self) -> None:
        """Find out how the model's keys are turned. Raises ConfigError if they cannot be."""
        if self._turner is None:
            self._turner = Turner(self.loaded)

    def _place_segments(self) -> bool:
        """Copy segments that have arrived, and look at them. False if there is nothing to do."""
        placings, looks = self.scheduler.take_placings()
        if placings:
            assert self._turner is not None
            self._turner.place(self.device.tensor, placings)
        for part in looks:
            look_at(part, self.runner.key_changes, self._config.max_num_batched_tokens)
        return bool(placings or looks)

    def close(self) -> None:
        try:
            for request_id in list(self._live):
                self.abort(request_id)
        except EngineLost as error:
            log.error("the engine closes with unfinished requests", exc_info=error)
        self.grammars.close()
        super().close()

    def _settle(self) -> None:
        if self.offloader is None:
            return
        arrived, self._arrived = self._arrived, []
        for done in arrived + self.offloader.step():
            request = self.scheduler.settle(done)
            if request is not None:
                self._story.loaded(request, done)
        if self.audits is not None:
            self.audits.poll()
        self._follow_quarantine()

    def _keep_moving(self) -> None:
        """Move blocks on between tiers during a step, which may be longer than many transfers."""
        now = time.monotonic()
        if self.offloader is not None and now >= self._moves_again:
            self._arrived += self.offloader.step()
            self._moves_again = now + _HOP_SECONDS

    def _catch_up(self, meanwhile: Callable[[], None]) -> None:
        """Decode the last step's text and call `meanwhile`: no step depends on either."""
        unread, self._unread = self._unread, []
        for progress in unread:
            _ = progress.text
        meanwhile()

    def _row(self, live: _Live) -> SamplerRow:
        if live.row is not None:
            return live.row
        request, params = live.request, live.request.params
        num_prompt = len(request.prompt_ids)
        too_early = len(request.tokens) - num_prompt < params.min_tokens
        ends = (*self._eos_ids, *live.stop_ids) if too_early else ()
        row = SamplerRow(params, live.generator, request.tokens, num_prompt, ends, live.grammar)
        live.row = None if too_early else row
        return row

    def _take(self, live: _Live, sampled: Sampled) -> Progress:
        request, now = live.request, time.monotonic()
        request.append(sampled.token_id)
        live.num_requeues = 0
        if request.first_token_time is None:
            request.first_token_time = now
            self._story.first_token(request, self._costs.prefill)
        try:
            read = self._judge(live, sampled.token_id)
        except Exception as error:  # only this request's text: the books are not affected
            read = partial(_raise, error)
        return Progress(request, sampled, read, self._note_undecodable)

    def _end(self, request: Request) -> None:
        request.finished_time = time.monotonic()
        request.forget_expected()
        self.scheduler.remove(request)
        self.admission.end(request.id, request.finished_time)
        self._story.finished(request)
        if self.sessions is not None:
            hints = request.params.hints
            chains = [] if hints is NO_HINTS else self._chains(request)
            self.sessions.ended(hints, chains, request.tenant)

    def _chains(self, request: Request) -> list[Chain]:
        """The blocks that a request has used. None if it was aborted before it started."""
        if not request.max_computed:
            return []
        own = request.chain.keys[: request.max_computed // self.block_tokens]
        segments = {segment.keys[-1]: segment.keys for segment in request.segments}
        return [
            Chain(own, request.num_cached_tokens // self.block_tokens),
            *(
                Chain(keys, len(keys) - request.num_new_blocks.get(last, 0))
                for last, keys in segments.items()
            ),
        ]

    # Faults.

    def _note_undecodable(self, request: Request, error: Exception) -> EngineFault:
        """Record that a request has no text, or no grammar. It alone ends, before the next step."""
        if isinstance(error, GrammarFault):
            log.warning("request %s failed: %s", request.id, error)
            fault: EngineFault = error
        else:
            log.error("request %s failed: its text cannot be decoded", request.id, exc_info=error)
            fault = EngineFault.of(error)
        self._undecodable[request.id] = fault
        if request.id not in self._live:
            self._failed.append((request, fault))
        return fault

    def _end_undecodable(self) -> None:
        undecodable, self._undecodable = self._undecodable, {}
        for request_id, fault in undecodable.items():
            live = self._live.pop(request_id, None)
            if live is not None:
                live.request.finish_reason = "error"
                self._failed.append((live.request, fault))
                self._end(live.request)

    def _end_stuck(self) -> None:
        stuck = self.scheduler.take_stuck()
        if stuck and self._waits_for_node():
            return  # they are tried again
        for request in stuck:
            fault = EngineFault(
                "this request needs more KV than the device pool holds, and too many of its blocks "
                f"cannot leave for DRAM, {self._why_stuck()}, or enlarge the pool."
            )
            log.error("request %s failed: %s", request.id, fault)
            self._live.pop(request.id, None)
            request.finish_reason = "error"
            self._failed.append((request, fault))
            self._end(request)

    def _why_stuck(self) -> str:
        if self.offloader is not None and not self.offloader.is_available:
            return "because the node is gone. Start the node again"
        return 'because they do not fit its codec. Set host.codec to "raw"'

    def _waits_for_node(self) -> bool:
        """Whether blocks cannot leave the device because a node is gone, but may soon be back.

        Also if it has just come back, perhaps unnoticed between two steps: its memory is used only
        once the old one is free, which is when the request that is stuck has left it.
        """
        if self.offloader is None or self._node is None:
            return False
        now = time.monotonic()
        if now - self._last_stuck > _NODE_PATIENCE_SECONDS:
            self._first_stuck = now
        self._last_stuck = now
        is_back = self.offloader.is_available
        limit = _NODE_SETTLES_SECONDS if is_back else _NODE_PATIENCE_SECONDS
        return now - self._first_stuck < limit

    def _recover(self, error: Exception, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Rebuild the books after a step or a call failed halfway, and continue.

        Requests that were being computed fail. If none were, all are computed again, and all fail
        if the next step fails too. Nothing on the device is trusted. Blocks in lower tiers were
        complete before they were saved, and are kept if the tiers' books add up.
        """
        self._num_faults += 1
        log.error("a step of the engine failed: its requests fail, others continue", exc_info=error)
        if self._is_lost or self._num_faults > MAX_FAULTS_IN_A_ROW:
            self._lose(error)
        self._catch_up(meanwhile)  # the tokens of the step before are valid
        try:
            self._read_step(is_rescue=True)  # and so are those of one that was only launched
        except Exception:
            log.exception("the step before it failed too")
        fault = EngineFault.of(error)
        num_failed = self._fail_requests_of_step(fault)
        survivors = sorted((live.request for live in self._live.values()), key=lambda r: r.order)
        try:
            reopened = self._rebuild(must_reopen=self._num_faults > 1)
        except Exception as broken:
            self._lose(broken)
        self._arrived = []
        for request in survivors:
            request.restart()
            if request.num_preemptions:
                self.admission.start(request.id, request.max_total_tokens)
            self.scheduler.add(request)
        self._story.failed(type(error).__name__, num_failed, len(survivors), reopened)
        log.warning(
            "the engine has recovered: %d requests failed, %d are recomputed%s",
            num_failed,
            len(survivors),
            "; the tiers below the device were reopened" if reopened else "",
        )

    def _fail_requests_of_step(self, fault: EngineFault) -> int:
        computed = {c.request.id: c.request for c in self._chunks if c.request.id in self._live}
        self._chunks = ()
        for live in self._live.values():
            live.num_requeues += 1
            is_stuck = live.num_requeues > MAX_REQUEUES
            if is_stuck or (not computed and self._num_faults > 1):
                computed[live.request.id] = live.request
        for request in computed.values():
            del self._live[request.id]
            request.finish_reason = "error"
            self._close_story(request)
            self._failed.append((request, fault))
        return len(computed)

    def _close_story(self, request: Request) -> None:
        """End a request whose books are lost."""
        request.forget_expected()
        request.phase = RequestPhase.FINISHED
        request.finished_time = time.monotonic()
        self._story.finished(request)

    def _require_not_lost(self) -> None:
        if self._is_lost:
            raise EngineLost("the engine has failed and cannot recover; restart the process.")

    def _lose(self, error: Exception) -> NoReturn:
        self._is_lost = True
        raise EngineLost(
            f"the engine failed and cannot recover ({type(error).__name__}). The cause is in its "
            "log; restart the process."
        ) from error

    def _judge(self, live: _Live, token_id: int) -> Callable[[], str]:
        """Set `finish_reason` if the request ends with this token.

        The returned function decodes the text that the token adds.
        """
        request, params, detokenizer = live.request, live.request.params, live.detokenizer
        read = partial(detokenizer.append, token_id)
        if live.grammar is not None:
            live.grammar.advance(token_id)
        is_end = not params.ignore_eos and token_id in self.loaded.eos_token_ids
        if is_end or token_id in live.stop_ids:
            request.finish_reason, request.stop_reason = "stop", None if is_end else token_id
            if params.include_stop_str_in_output:
                return lambda: read() + detokenizer.finish()
            return detokenizer.finish
        if params.stop_strings:  # the text decides, so it is decoded now
            read = partial(str, read())
            if detokenizer.stopped_by is not None:
                request.finish_reason, request.stop_reason = "stop", detokenizer.stopped_by
                return read
        if live.grammar is not None and live.grammar.is_finished:
            request.finish_reason = "stop"  # without the end token, which is all that could follow
            return lambda: read() + detokenizer.finish()
        if request.num_output == params.max_tokens:
            request.finish_reason = "length"
            return lambda: read() + detokenizer.finish()
        return read

    def _max_new(self, num_prompt: int, params: SamplingParams) -> int:
        """How many tokens the request may add. Raises TooLong or Busy if it cannot be queued."""
        room = self.loaded.max_tokens - num_prompt
        if room < 1:
            # OpenAI's wording: clients search for it before they shorten a prompt.
            raise TooLong(
                f"This model's maximum context length is {self.loaded.max_tokens} tokens. However, "
                f"you requested {num_prompt + 1} tokens ({num_prompt} in the prompt, at least 1 in "
                "the completion). Please reduce the length of the prompt."
            )
        if params.max_tokens is None:
            # The default is all that fits, which the pool may limit too.
            num_blocks = self.admission.num_running_blocks(never_cold=params.residency.never_cold)
            max_new = max(1, min(room, num_blocks * self.block_tokens - num_prompt))
        else:
            max_new = min(params.max_tokens, room)
        self.admission.check(
            num_prompt, max_new, self.scheduler.num_waiting, never_cold=params.residency.never_cold
        )
        return max_new


def _raise(error: Exception) -> str:
    raise error
