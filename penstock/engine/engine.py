"""The engine: requests in, tokens out, one `step` at a time. KV lives in tiers behind it.

    engine.add("a", prompt_ids, params)
    while engine.has_work:
        for progress in engine.step(): ...

One thread owns an engine. A step settles what has been loaded and saved, lets the scheduler choose
the next tokens, computes them, and samples. Whatever becomes of a tier, a request only ever sees
its tokens.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch

from penstock.build import build_offloader
from penstock.choosing import LoadOrCompute
from penstock.config import Config
from penstock.costs import Choice
from penstock.engine.admission import Admission, Busy, TooLong
from penstock.engine.blocks import BlockPool
from penstock.engine.census import Sighting, take_census
from penstock.engine.detokenize import Detokenizer
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.engine.residency import Residency, ResidencyConfig, Turns
from penstock.engine.rotation import Rotation
from penstock.engine.runner import Runner, TorchRunner
from penstock.engine.sampler import Row, Sampled, begin_sampling, make_generator
from penstock.engine.scheduler import Scheduler
from penstock.engine.story import Story
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.hints import Hint
from penstock.keys import KeyChain, Namespace
from penstock.offload import Offloader
from penstock.plan.sizing import suggest_block_tokens
from penstock.sessions import Sessions
from penstock.stores.device import DevicePool
from penstock.transfer.cuda import CudaMover
from penstock.transfer.pinning import has_same_addresses
from penstock.types import NO_ORIGIN, BlockSpec, Done, Match, Origin, Tier
from penstock.units import MiB, format_bytes

_HOP_SECONDS = 0.005
_GPU_COLD_BYTES = 256 * MiB  # about 5 ms of a PCIe Gen5 link

LAYOUT = "blocks of [layers, 2, tokens, kv_heads, head_dim]"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's own settings; those of the tiers below are `penstock.config.Config`."""

    device_kv_bytes: int = 1 << 30
    block_tokens: int | None = None  # chosen so that a block has 1 to 2 MiB
    max_batched_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 256  # requests that have not started; more are refused as Busy
    residency: ResidencyConfig = field(default_factory=ResidencyConfig)


class Progress:
    """What a step did for one request."""

    __slots__ = ("_read", "_text", "request", "sampled")

    def __init__(self, request: Request, sampled: Sampled, read: Callable[[], str]) -> None:
        self.request = request
        self.sampled = sampled
        self._read: Callable[[], str] | None = read
        self._text = ""

    @property
    def text(self) -> str:
        """New text that may be shown. It is made when it is asked for, or in the next step."""
        if self._read is not None:
            self._text, self._read = self._read(), None
        return self._text


@dataclass(slots=True)
class _Live:
    request: Request
    generator: torch.Generator | None
    detokenizer: Detokenizer
    stop_ids: frozenset[int]
    row: Row | None = None  # once it does not change any more


class Engine:
    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        tiers: Config | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        """Without `tiers` nothing is offloaded: what does not fit the pool is recomputed."""
        config = config or EngineConfig()
        self.loaded = loaded
        itemsize = loaded.dtype.itemsize
        token_bytes = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * itemsize
        self.block_tokens = config.block_tokens or suggest_block_tokens(token_bytes)
        block_bytes = token_bytes * self.block_tokens
        num_blocks = config.device_kv_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"the device pool of {format_bytes(config.device_kv_bytes)} holds not one block "
                f"of {format_bytes(block_bytes)}; give it more, or choose smaller blocks."
            )
        self.namespace = Namespace(
            loaded.name,
            loaded.weights_fingerprint,
            str(loaded.dtype).removeprefix("torch."),
            LAYOUT,
            self.block_tokens,
            rope=loaded.rope,
        )
        self.device = device = DevicePool(
            num_blocks,
            loaded.num_layers,
            self.block_tokens,
            loaded.num_kv_heads,
            loaded.head_dim,
            loaded.dtype,
            loaded.device,
        )
        self.pool = BlockPool(num_blocks)
        self.offloader: Offloader | None = None
        if tiers is not None:
            spec = BlockSpec(self.namespace.physical().digest(), block_bytes, self.block_tokens)
            mover = partial(CudaMover, device) if device.on_gpu else None
            self.offloader = build_offloader(
                tiers, spec, device, observers=observers, device_mover=mover
            )
        self.sessions = None if self.offloader is None else Sessions(self.offloader)
        try:
            self.runner, residency = self._make_runner(config)
        except BaseException:  # no room to work in beside the pool, say
            if self.offloader is not None:
                self.offloader.close()
            raise
        self._residency = Residency(residency, self.block_tokens, block_bytes, num_blocks)
        self._costs = LoadOrCompute(block_bytes, self.block_tokens)
        self._story = Story(block_bytes, self.block_tokens, observers)
        self.admission = Admission(
            self.block_tokens,
            num_blocks,
            None if self.offloader is None else self.offloader.num_blocks,
            config.max_waiting,
            num_cold_blocks=self._num_cold_blocks(residency),
        )
        # A chunk is computed on the device, beside blocks that stay there: with sequences larger
        # than the pool, one that takes all of it would wait for ever.
        max_chunk_tokens = max(1, num_blocks // 2) * self.block_tokens
        num_batched = config.max_batched_tokens
        if self._num_cold_blocks(residency):
            num_batched = min(num_batched, max_chunk_tokens)
        self.scheduler = Scheduler(
            self.pool,
            self.block_tokens,
            admission=self.admission,
            tiers=self.offloader,
            choose=self._choose,
            max_batched_tokens=num_batched,
            max_running=config.max_running,
            residency=self._residency,
            turns=Turns(residency.max_cold_bytes_per_step, block_bytes),
            rotation=Rotation(residency.turn_seconds, self.block_tokens, self.offloader),
        )
        self._arrived: list[Done] = []  # while a step was computed
        self._unread: list[Progress] = []  # of the last step
        self._moves_again = 0.0
        self._live: dict[str, _Live] = {}
        self._sequence = count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_moving(self) -> bool:
        """Whether KV is on its way between tiers; then `step` wants to be called."""
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
    ) -> Request:
        """Queue a request. Raises ConfigError or TooLong if it can never be served, or Busy."""
        if not prompt_ids:
            raise ConfigError("the prompt is empty; expected at least one token.")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.loaded.vocab_size:
            raise ConfigError(
                f"the prompt has token ids from {min(prompt_ids)} to {max(prompt_ids)}; expected "
                f"0 to {self.loaded.vocab_size - 1}, as this model's tokenizer gives them."
            )
        if params.biases and params.biases[-1][0] >= self.loaded.vocab_size:
            raise ConfigError(
                f"logit_bias names token {params.biases[-1][0]}; expected 0 to "
                f"{self.loaded.vocab_size - 1}, as this model's tokenizer gives them."
            )
        try:
            max_new = self._max_new(len(prompt_ids), params)
        except (TooLong, Busy) as refusal:
            self._story.refused("busy" if isinstance(refusal, Busy) else "too_long")
            raise
        min_new = min(params.min_tokens, max_new)
        params = replace(params, max_tokens=max_new, min_tokens=min_new)
        request = Request(
            request_id,
            tuple(prompt_ids),
            params,
            KeyChain(replace(self.namespace, tenant=tenant)),
            priority=priority,
            tenant=tenant,
            origin=origin,
            max_total_tokens=len(prompt_ids) + max_new,
            arrival=time.monotonic(),
            sequence=next(self._sequence),
        )
        self.scheduler.add(request)
        if self.sessions is not None:
            self.sessions.began(params.hints, tenant)
        self._live[request_id] = _Live(
            request,
            make_generator(params.seed, index),
            Detokenizer(self.loaded.tokenizer, list(prompt_ids), params),
            frozenset(params.stop_ids),
        )
        return request

    def hint(self, hint: Hint, prompt_ids: Sequence[int] = (), *, tenant: str = "") -> int:
        """Follow a hint for its session or, if it names none, for a prompt; returns its blocks.

        0 where nothing is offloaded, and where nothing is known of the session or the prompt.
        """
        if self.sessions is None:
            return 0
        prefix = KeyChain(
            replace(self.namespace, tenant=tenant), prompt_ids[: self.loaded.max_tokens]
        )
        return self.sessions.apply(hint, prefix.keys, tenant)

    def census(self) -> list[Sighting]:
        """Every sequence there is: those that run, load and wait, each kind in its order."""
        return take_census(self.scheduler, time.monotonic())

    def abort(self, request_id: str) -> None:
        """Give a request up, whatever it is doing. Unknown names are passed over."""
        live = self._live.pop(request_id, None)
        if live is not None:
            live.request.finish_reason = "abort"
            self._end(live.request)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Progress]:
        """Compute one batch. Empty when nothing could run yet, or nothing is left to do.

        `meanwhile`, for what the caller has to do between steps, is called once: a GPU computes
        while it runs, and it must not raise.
        """
        self._settle()
        chunks = self.scheduler.schedule()
        self._story.entered(self.scheduler, time.monotonic())
        self._story.scheduled(self.scheduler, self.pool)
        if not chunks:
            self._catch_up(meanwhile)
            if self.offloader is not None and self.scheduler.has_work:
                self.offloader.pause(0.002)  # loads are under way: let them have the processor
            return []
        if not self.runner.only_queues:
            self._catch_up(meanwhile)
        started = time.monotonic()
        logits = self.runner.run(chunks, self._keep_moving)
        # A GPU has only been told what to do: the books are kept while it does it. What is saved
        # is copied behind it.
        lives = [self._live[chunk.request.id] for chunk in chunks if chunk.samples]
        finish = begin_sampling(logits, [self._row(live) for live in lives], self.runner.post)
        self.scheduler.computed(chunks)
        if self.runner.only_queues:
            self._catch_up(meanwhile)
        self.runner.wait(self._keep_moving)
        seconds = time.monotonic() - started
        self._costs.observe([(chunk.num_tokens, chunk.start) for chunk in chunks], seconds)
        link = None if self.offloader is None else self.offloader.rates.get(Tier.HOST)
        self._story.stepped(chunks, seconds, link)
        self._unread = [self._take(*each) for each in zip(lives, finish(), strict=True)]
        return self._unread

    def close(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)
        self.runner.close()
        if self.offloader is not None:
            self.offloader.close()

    def check(self) -> None:
        self.scheduler.check()
        if self.offloader is not None:
            self.offloader.check()
        if self.sessions is not None:
            self.sessions.check()

    def _settle(self) -> None:
        if self.offloader is None:
            return
        arrived, self._arrived = self._arrived, []
        for done in arrived + self.offloader.step():
            request = self.scheduler.settle(done)
            if request is not None:
                self._story.loaded(request, done)

    def _keep_moving(self) -> None:
        """A step takes as long as some hops: the next one must not wait for its end."""
        now = time.monotonic()
        if self.offloader is not None and now >= self._moves_again:
            self._arrived += self.offloader.step()
            self._moves_again = now + _HOP_SECONDS

    def _catch_up(self, meanwhile: Callable[[], None]) -> None:
        """Whatever the last step left to be done that no other step depends on."""
        unread, self._unread = self._unread, []
        for progress in unread:
            _ = progress.text
        meanwhile()

    def _row(self, live: _Live) -> Row:
        if live.row is not None:
            return live.row
        request, params = live.request, live.request.params
        num_prompt = len(request.prompt_ids)
        too_early = len(request.tokens) - num_prompt < params.min_tokens
        ends = (*self.loaded.eos_token_ids, *live.stop_ids) if too_early else ()
        row = Row(params, live.generator, request.tokens, num_prompt, ends)
        live.row = None if too_early else row
        return row

    def _take(self, live: _Live, sampled: Sampled) -> Progress:
        request, now = live.request, time.monotonic()
        request.append(sampled.token_id)
        if request.first_token_time is None:
            request.first_token_time = now
            self._story.first_token(request, self._costs.prefill)
        progress = Progress(request, sampled, self._judge(live, sampled.token_id))
        if request.finish_reason is not None:
            del self._live[request.id]
            self._end(request)
        return progress

    def _end(self, request: Request) -> None:
        request.finished_time = time.monotonic()
        self.scheduler.remove(request)
        self.admission.end(request.id, request.finished_time)
        self._story.finished(request)
        if self.sessions is not None:
            self.sessions.ended(
                request.params.hints,
                request.chain.keys[: request.max_computed // self.block_tokens],
                request.num_cached_tokens // self.block_tokens,
                request.tenant,
            )

    def _judge(self, live: _Live, token_id: int) -> Callable[[], str]:
        """Whether the request ends with this token; what is returned makes the text it adds."""
        request, params, detokenizer = live.request, live.request.params, live.detokenizer
        read = partial(detokenizer.append, token_id)
        is_end = not params.ignore_eos and token_id in self.loaded.eos_token_ids
        if is_end or token_id in live.stop_ids:
            request.finish_reason, request.stop_reason = "stop", None if is_end else token_id
            if params.include_stop_str_in_output:
                return lambda: read() + detokenizer.finish()
            return detokenizer.finish
        if params.stop_strings:  # the text decides: it cannot wait
            read = partial(str, read())
            if detokenizer.stopped_by is not None:
                request.finish_reason, request.stop_reason = "stop", detokenizer.stopped_by
                return read
        if len(request.tokens) - len(request.prompt_ids) == params.max_tokens:
            request.finish_reason = "length"
            return lambda: read() + detokenizer.finish()
        return read

    def _make_runner(self, config: EngineConfig) -> tuple[Runner, ResidencyConfig]:
        """And the residency that it is able to."""
        host = None if self.offloader is None else self.offloader.host
        residency, loaded, device = config.residency, self.loaded, self.device
        if device.on_gpu and residency.max_cold_bytes_per_step is None:
            residency = replace(residency, max_cold_bytes_per_step=_GPU_COLD_BYTES)
        if device.on_gpu and importlib.util.find_spec("triton") is not None:
            from penstock.engine.triton_runner import TritonRunner

            runner = TritonRunner(
                loaded, device, self.block_tokens, host, max_running=config.max_running
            )
            reads_host = host is None or has_same_addresses(host)
            return runner, replace(residency, cold=residency.cold and reads_host)
        plain = TorchRunner(loaded.model, device, self.block_tokens, loaded.num_heads, host)
        return plain, replace(residency, cold=residency.cold and not device.on_gpu)

    def _num_cold_blocks(self, residency: ResidencyConfig) -> int:
        """How many blocks of running sequences can lie in HOST."""
        if self.offloader is None or not residency.cold:
            return 0
        return self.offloader.num_host_blocks

    def _max_new(self, num_prompt: int, params: SamplingParams) -> int:
        """How many tokens the request may add; raises TooLong or Busy if it cannot be queued."""
        room = self.loaded.max_tokens - num_prompt
        if room < 1:
            # OpenAI's words, which clients look for before they shorten a prompt by themselves.
            raise TooLong(
                f"This model's maximum context length is {self.loaded.max_tokens} tokens. However, "
                f"you requested {num_prompt + 1} tokens ({num_prompt} in the prompt, at least 1 in "
                "the completion). Please reduce the length of the prompt."
            )
        if params.max_tokens is None:
            # Asked for as much as there is room for: the pool is part of what there is.
            num_blocks = self.admission.num_running_blocks(never_cold=params.residency.never_cold)
            max_new = max(1, min(room, num_blocks * self.block_tokens - num_prompt))
        else:
            max_new = min(params.max_tokens, room)
        self.admission.check(
            num_prompt, max_new, self.scheduler.num_waiting, never_cold=params.residency.never_cold
        )
        return max_new

    def _choose(self, match: Match, num_past: int) -> Choice:
        assert self.offloader is not None
        return self._costs.choose(match, num_past, self.offloader.rates, can_meet=True)
