"""What is asked of Penstock for every model: a reload gives what vLLM's own hit gives, to the bit.

Log probabilities are compared, not tokens: a whole group that was not restored changes greedy
tokens rarely. The oracle is vLLM's own hit of the same length, since another split of a prompt into
steps may round differently. A model costs two starts: the second one shows what a restart finds,
and has so little room that requests are preempted. One worker runs within the test's process, or
starts would take most of the time; test_group_soak.py and several workers have real processes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import group_models
import pytest
from conftest import Faults, Tokens, Vllm, transfer
from group_models import VOCABULARY, Model

from penstock.connectors.vllm import identity

NUM_ANSWER = 12
NUM_GROWING = 100
CLOSE = 1e-4  # rounding moves log probabilities by 1e-6, a group that is not restored by 1e-1

Bits = list[dict[int, float]]  # of every answered token: the likeliest ones' log probabilities


@dataclass(frozen=True)
class Answer:
    tokens: Tokens
    bits: Bits
    num_cached: int  # tokens of the prompt that were not computed, wherever they came from
    loaded: dict[str, int]  # those that Penstock brought, by where from
    num_accepted: float  # of the drafter's tokens


class Case:
    """A model served by vLLM with Penstock: one engine, and one more after a restart."""

    def __init__(
        self,
        model: Model,
        models: Path,
        disk: Path,
        faults: Faults,
        more: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self.model, self.faults = model, faults
        self._given = group_models.options(model.name, models) | dict(more)
        self._disk, self._environment = disk, environment
        self._engine: Vllm | None = None
        self._is_broken = False
        self._undisturbed: list[Tokens] = []
        self._first: list[tuple[Tokens, Answer, Answer]] = []
        self.is_restarted = False

    @property
    def vllm(self) -> Vllm:
        if self._engine is None:
            self._engine = self._start()
        return self._engine

    def _start(self, **more: Any) -> Vllm:
        assert not self._is_broken, "vLLM did not start before"
        self._is_broken = True
        made = self._try_to_start(**more)
        self._is_broken = False
        return made

    def _try_to_start(self, **more: Any) -> Vllm:
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        settings = {"transfer.load_deadline_seconds": 20.0}
        try:
            made = transfer(
                disk_path=str(self._disk),
                disk_size=1.0,
                kv_offloading_size=0.25,
                always_load=True,
                set=settings,
            )
            given = {"max_model_len": 512} | self._given | more
            one_worker = not given.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}
            # This process made the model's files, before it started the engine.
            with patch.object(identity, "process_start", time.time):
                return Vllm(in_process=one_worker, kv_transfer_config=made, **given)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value

    def restart(self) -> None:
        if not self.is_restarted:
            _ = self.undisturbed
            self.close()
            self._engine = self._start(num_gpu_blocks_override=self.model.small_pool)
            self.is_restarted = True

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def ask(self, prompt: Tokens, num: int = NUM_ANSWER, salt: str = "", **params: Any) -> Answer:
        before = self._num_accepted()
        params = {"detokenize": False, "logprobs": 5} | params
        output = self.vllm.ask([prompt], num, salt=salt, **params)[0]
        told = (output.kv_transfer_params or {}).get("penstock", {})
        made = output.outputs[0]
        return Answer(
            list(made.token_ids),
            [{token: seen.logprob for token, seen in one.items()} for one in made.logprobs],
            output.num_cached_tokens or 0,
            told.get("loaded_tokens", {}),
            self._num_accepted() - before,
        )

    def _num_accepted(self) -> float:
        if "speculative_config" not in self._given:
            return 0.0
        return self.vllm.metric("vllm:spec_decode_num_accepted_tokens")

    @property
    def first(self) -> list[tuple[Tokens, Answer, Answer]]:
        """Prompts, their cold answers, and those of vLLM's own hits."""
        if not self._first:
            assert not self.is_restarted
            for seed, num in enumerate(self.prompt_lengths()):
                prompt = draw(num, seed)
                self._first.append((prompt, self.ask(prompt), self.ask(prompt)))
        return self._first

    def prompt_lengths(self) -> list[int]:
        unit = self.model.block_tokens
        rest = [0, 0] if self.model.only_whole_hits else [12, 13]
        return [300 // unit * unit + rest[0], max(333, 3 * unit) // unit * unit + rest[1]]

    def growing_prompts(self) -> list[Tokens]:
        """Six short ones, which fit together as long as their answers are short too."""
        num = max(self.model.block_tokens, 64) - 20
        return [draw(num - 2 * seed, 20 + seed) for seed in range(6)]

    @property
    def undisturbed(self) -> list[Tokens]:
        """Long answers of the growing prompts, with room for all."""
        if not self._undisturbed:
            assert not self.is_restarted
            self._undisturbed = self.vllm.answers(
                self.growing_prompts(), NUM_GROWING, salt="undisturbed", detokenize=False
            )
        return self._undisturbed

    def wait_for_disk(self) -> None:
        """After errors Penstock leaves a disk alone for some seconds."""
        prompt = self.first[0][0]
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            self.vllm.forget()
            self.faults.empty_host()
            if "disk" in self.ask(prompt).loaded:
                return
        raise AssertionError("nothing is loaded from disk any more")

    def all_hit(self, *, source: str) -> None:
        """Ask all first prompts again: they come from there, and give the bits they gave."""
        for prompt, _, local in self.first:
            hit = self.ask(prompt)
            same(hit, local)
            assert hit.loaded == {source: hit.num_cached}
            assert hit.num_accepted == local.num_accepted


def draw(num: int, seed: int) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY - 12) for _ in range(num)]


def same(answer: Answer, other: Answer) -> None:
    assert answer.num_cached == other.num_cached
    assert answer.tokens == other.tokens
    assert answer.bits == other.bits


def close(answer: Bits, other: Bits) -> None:
    """Log probabilities of the same tokens, but for rounding."""
    assert len(answer) == len(other)
    for one, two in zip(answer, other, strict=True):
        shared = one.keys() & two.keys()
        assert len(shared) >= 4  # the fifth and the sixth may lie too close together
        assert max(abs(one[token] - two[token]) for token in shared) < CLOSE


class Checks:
    """The tests of one model, in this order. A file's fixture `name` says which models."""

    def test_a_hit_in_dram_has_the_bits_of_vllms_own(self, case: Case) -> None:
        for prompt, cold, local in case.first:
            assert (cold.num_cached, cold.loaded) == (0, {})
            unit = case.model.block_tokens
            assert local.num_cached == len(prompt) // unit * unit
            if case.model.is_local_alone:
                assert local.loaded == {}
            if case.model.local_is_cold:
                assert local.tokens == cold.tokens
                close(local.bits, cold.bits)
        assert case.first[0][2].bits != case.first[1][2].bits
        case.vllm.forget()
        case.all_hit(source="host")

    def test_a_hit_on_disk_has_the_bits_of_vllms_own(self, case: Case) -> None:
        _ = case.first
        case.vllm.forget()
        case.faults.empty_host()
        case.all_hit(source="disk")

    def test_a_second_turn_hits_what_was_generated(self, case: Case) -> None:
        unit = case.model.block_tokens
        border = 375 // unit * unit  # lies within the first turn's answer
        prompt = draw(border - 9, 10)
        first = case.ask(prompt)
        if case.model.only_whole_hits:
            # vLLM's own decode is the oracle: after a whole hit it goes on from the same place.
            case.vllm.forget()
            hit = case.ask([*prompt, *first.tokens[:9]], 3)
            assert hit.num_cached == border
            assert (hit.tokens, hit.bits) == (first.tokens[9:], first.bits[9:])
            return
        second = [*prompt, *first.tokens, *draw(7, 11)]
        assert case.ask(prompt, salt="local").tokens == first.tokens
        local = case.ask(second, salt="local")
        cold = case.ask(second, salt="cold")
        case.vllm.forget()
        hit = case.ask(second)
        assert hit.num_cached == border
        if local.num_cached == border:
            same(hit, local)
            return
        # Of an answer's states vLLM itself keeps none. Its own decode is the oracle: from the state
        # at the border, one more token is computed as it was computed then.
        case.vllm.forget()
        resumed = case.ask([*prompt, *first.tokens[:10]], 2)
        assert resumed.num_cached == border
        close(resumed.bits, first.bits[10:])
        if case.model.local_is_cold:
            close(hit.bits, cold.bits)

    @pytest.mark.parametrize("place", [0, 0.25, 0.5, 0.75, 1, None])
    def test_a_failed_load_is_a_miss(self, case: Case, place: float | None) -> None:
        """One block of each read fails, at several places so that every group has its turn."""
        prompt, cold, local = case.first[0]
        case.wait_for_disk()
        case.vllm.forget()
        case.faults.empty_host()
        case.faults.set(**({"read_error": 1.0} if place is None else {"read_error_at": place}))
        missed = case.ask(prompt)
        case.faults.set()
        assert missed.tokens == cold.tokens
        close(missed.bits, cold.bits)
        # What was computed again is saved again.
        case.vllm.forget()
        again = case.ask(prompt)
        same(again, local)

    def test_an_abort_while_loading_leaves_nothing_behind(self, case: Case) -> None:
        from vllm import SamplingParams

        prompt, _, local = case.first[0]
        case.wait_for_disk()
        case.vllm.forget()
        case.faults.empty_host()
        case.faults.set(read_delay=1.0)
        engine = case.vllm.llm.llm_engine
        params = SamplingParams(max_tokens=4, detokenize=False)
        engine.add_request("gone", {"prompt_token_ids": prompt}, params)
        case.vllm.run_for(0.5)
        engine.abort_request(["gone"])
        while engine.has_unfinished_requests():
            engine.step()
        case.faults.set()
        case.vllm.forget()
        same(case.ask(prompt), local)
        case.vllm.check_nothing_is_held()

    def test_a_restart_finds_the_same_bits_on_disk(self, case: Case) -> None:
        _ = case.first
        case.restart()
        case.all_hit(source="disk")

    def test_preempted_requests_give_the_same_answers(self, case: Case) -> None:
        expected = case.undisturbed
        case.restart()
        together = case.vllm.answers(case.growing_prompts(), NUM_GROWING, detokenize=False)
        assert case.vllm.metric("vllm:num_preemptions") > 0
        if case.model.local_is_cold:
            assert together == expected
        case.vllm.check_nothing_is_held()
