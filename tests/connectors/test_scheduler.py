"""The scheduler's side, one behaviour at a time, under a small vLLM (see `vllm_model`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connectors.memory_model import BLOCK_TOKENS
from connectors.pool_model import Request
from connectors.vllm_model import Vllm
from tools import flip_bit

from penstock.connectors.vllm import lookups
from penstock.connectors.vllm.kv_events import BlockNews
from penstock.connectors.vllm.load_choice import LoadChooser
from penstock.connectors.vllm.scheduler import Ways
from penstock.connectors.vllm.tracked import Loading
from penstock.connectors.vllm.worker_guard import GuardedWorker
from penstock.errors import BookError
from penstock.events import Decided, Event, LookedUp
from penstock.transfer.copiers import NoCopier
from penstock.types import Match, Run, Slot, TicketId, Tier

Models = Callable[..., Vllm]
PROMPT = list(range(1, 23))  # five full blocks, and two tokens


@pytest.fixture
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Models]:
    """Makes models without a prefix cache of their own; each must close cleanly."""
    made: list[Vllm] = []

    def make(*, disk: bool = False, **options: Any) -> Vllm:
        options = {"is_caching": False, "num_host": 24, **options}
        made.append(Vllm(tmp_path / "kv" if disk else None, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
        if request.node.get_closest_marker("xfail") is None:
            model.audit()


def ask(vllm: Vllm, prompt: Sequence[int] = PROMPT, max_tokens: int = 1, **fields: Any) -> Request:
    """One request, from beginning to end; all is saved when this returns."""
    request = vllm.add(prompt, max_tokens, **fields)
    vllm.flush()
    return request


def loaded(vllm: Vllm, request: Request) -> dict[str, int]:
    answer = vllm.answers[request.request_id]
    found: dict[str, int] = {} if answer is None else answer["penstock"]["loaded_tokens"]
    return found


def start_loading(vllm: Vllm, prompt: Sequence[int] = PROMPT) -> Request:
    """A request that waits for its load, whose copies do not end."""
    for mover in vllm.movers:
        mover.gate.clear()
    request = vllm.add(prompt, 1)
    vllm.step()
    assert request.status == "loading"
    return request


def let_go(vllm: Vllm) -> None:
    for mover in vllm.movers:
        mover.gate.set()


def host_slots(vllm: Vllm, request: Request) -> list[Slot]:
    """Where DRAM keeps the request's full blocks, as the seals tell."""
    assert request.chain is not None
    places = [Slot(slot) for slot in range(vllm.host.num_slots)]
    held = {bytes(vllm.host.seals[32 * slot : 32 * slot + 32]): slot for slot in places}
    return [held[key] for key in request.chain.keys if key in held]


def spoil(vllm: Vllm, slot: Slot) -> None:
    """A slot of DRAM is written to without the books' knowing."""
    vllm.seals.open([slot])
    vllm.host.view(slot)[:] = b"\xdd" * vllm.host.stride_bytes


# Saves and loads.


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_one_request_computed_is_loaded_by_the_next(models: Models, num_workers: int) -> None:
    vllm = models(num_workers=num_workers)
    first = ask(vllm)
    assert loaded(vllm, first) == {}
    assert vllm.seen["blocks saved"] == 5
    second = ask(vllm, [*PROMPT, 7, 8, 9])
    assert loaded(vllm, second) == {"host": 5 * BLOCK_TOKENS}
    assert vllm.seen["blocks checked"] == 5
    assert vllm.seen["blocks saved"] == 6, "what came from there need not go again"


def test_from_the_disk_and_after_a_restart_too(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    vllm.offloader.empty_host()
    assert loaded(vllm, ask(vllm)) == {"disk": 5 * BLOCK_TOKENS}
    vllm.close()
    again = models(disk=True, truth=vllm.truth)
    assert loaded(again, ask(again)) == {"disk": 5 * BLOCK_TOKENS}


def test_what_a_load_brings_is_known_by_tier_while_it_runs(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm, PROMPT[:12])
    vllm.offloader.empty_host()
    ask(vllm)  # three blocks from the disk, two computed; all five are in DRAM
    request = start_loading(vllm)
    assert vllm.side.sources(request.request_id) == {Tier.HOST: 20}
    assert vllm.side.sources("nobody") == {}
    let_go(vllm)
    vllm.flush()


def test_output_is_saved_as_its_blocks_become_full(models: Models) -> None:
    vllm = models()
    first = ask(vllm, PROMPT, max_tokens=11)
    assert len(first.all_token_ids) == 33
    # The last token's KV was never computed: it was sampled, and that was all.
    second = ask(vllm, first.all_token_ids)
    assert loaded(vllm, second) == {"host": 32}


def test_a_prompt_that_is_there_as_a_whole_has_its_last_token_computed_again(
    models: Models,
) -> None:
    vllm = models()
    ask(vllm, PROMPT[:20], max_tokens=5)
    second = ask(vllm, PROMPT[:20])
    assert loaded(vllm, second) == {"host": 20}
    assert vllm.seen["whole prompts loaded"] == 1


def test_where_only_whole_prompts_may_be_loaded_no_part_of_one_is(models: Models) -> None:
    vllm = models(ways=Ways(hits_whole_prompts_only=True, fails_whole=True))
    ask(vllm, PROMPT[:20], max_tokens=5)
    assert loaded(vllm, ask(vllm, PROMPT[:20])) == {"host": 20}
    assert loaded(vllm, ask(vllm, PROMPT)) == {}, "two tokens would be computed after the hit"
    assert loaded(vllm, ask(vllm, [*PROMPT[:16], 99, 98, 97, 96])) == {}


def test_what_is_on_the_device_is_not_loaded(models: Models) -> None:
    vllm = models(is_caching=True)
    first = ask(vllm)
    assert loaded(vllm, ask(vllm)) == {}, "all of it is on the device"
    vllm.pool.forget(vllm.pool.find(first.past.digests)[2:])
    assert loaded(vllm, ask(vllm)) == {"host": 3 * BLOCK_TOKENS}


@pytest.mark.parametrize(
    "fields", [{"prompt_embeds": object()}, {"resumable": True}, {"prompt_token_ids": None}]
)
def test_what_its_tokens_do_not_name_is_left_alone(models: Models, fields: dict[str, Any]) -> None:
    vllm = models()
    request = vllm.add(PROMPT, 1, **fields)
    if request.prompt_token_ids is None:
        request.max_tokens += len(PROMPT)
    vllm.flush()
    assert vllm.seen["blocks saved"] == 0
    ask(vllm)
    assert vllm.seen["blocks saved"] == 5
    again = vllm.add(PROMPT, 1, **fields)
    again.max_tokens = request.max_tokens
    vllm.flush()
    assert loaded(vllm, again) == {}


def test_a_request_that_must_not_read_the_cache_fills_it_all_the_same(models: Models) -> None:
    vllm = models()
    ask(vllm, skip_reading_prefix_cache=True)
    assert loaded(vllm, ask(vllm, skip_reading_prefix_cache=True)) == {}
    assert loaded(vllm, ask(vllm)) == {"host": 20}


@pytest.mark.parametrize("kind", ["salt", "adapter"])
def test_salts_and_adapters_have_kv_of_their_own(models: Models, tmp_path: Path, kind: str) -> None:
    vllm = models()
    (tmp_path / "adapter.safetensors").write_bytes(b"A and B")
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path))
    fields = {"cache_salt": "mine"} if kind == "salt" else {"lora_request": lora}
    ask(vllm)
    assert loaded(vllm, ask(vllm, **fields)) == {}
    assert loaded(vllm, ask(vllm, **fields)) == {"host": 20}


def test_a_consumer_does_not_save_and_a_producer_does_not_load(
    models: Models, tmp_path: Path
) -> None:
    consumer = models(may_save=False)
    ask(consumer)
    assert consumer.seen["blocks saved"] == 0
    producer = models(may_load=False)
    ask(producer)
    assert producer.seen["blocks saved"] == 5
    assert loaded(producer, ask(producer)) == {}


# Fences.


def test_a_step_that_writes_to_a_block_which_is_being_saved_is_fenced(models: Models) -> None:
    vllm = models(num_blocks=6)  # room for one request
    vllm.movers[0].gate.clear()  # no copy ends
    vllm.add(PROMPT, 1)
    saving = vllm.step().orders
    assert sum(len(order.keys) for order in saving.saves_after) == 5
    assert not vllm.requests, "it has ended, and its blocks are free"
    vllm.add([30] * 10, 1)
    orders = vllm.side_step()
    assert orders.fence, "the blocks of the first are written to"
    assert set(orders.fence) <= {order.id for order in saving.saves_after}


def test_a_step_that_writes_elsewhere_is_not_fenced(models: Models) -> None:
    vllm = models(num_blocks=24)
    vllm.movers[0].gate.clear()
    first = vllm.add(PROMPT, 3)
    vllm.step()
    assert first.status == "running"
    vllm.add([30] * 10, 1)
    for _ in range(3):
        assert vllm.step().orders.fence == []
    let_go(vllm)
    vllm.flush()


def test_a_load_into_a_block_that_is_being_saved_is_fenced_too(models: Models) -> None:
    vllm = models(num_blocks=6)
    ask(vllm)
    vllm.movers[0].gate.clear()
    vllm.add([30] * 16, 1)
    vllm.step()  # its blocks are being saved
    vllm.add(PROMPT, 1)
    orders = vllm.side_step()
    assert orders.loads
    assert orders.fence


def test_what_a_preempted_request_computed_is_loaded_when_it_resumes(models: Models) -> None:
    vllm = models()
    request = vllm.add(PROMPT, 12)
    for _ in range(6):
        vllm.step()
    vllm.preempts_next = True
    vllm.step()
    assert request.block_ids == []
    vllm.flush()
    assert vllm.seen["preempted"] == 1
    assert loaded(vllm, request)["host"] >= 20
    assert len(request.all_token_ids) == len(PROMPT) + 12


# Losses.


def test_a_block_that_cannot_be_loaded_is_computed_and_saved_again(models: Models) -> None:
    vllm = models()
    first = ask(vllm)
    spoil(vllm, host_slots(vllm, first)[2])
    second = ask(vllm)
    assert vllm.seen["bad blocks"] == 1
    assert vllm.seen["resumed with part of a load"] == 1
    assert second.num_output == 1
    vllm.clock.advance(31.0)
    assert loaded(vllm, ask(vllm)) == {"host": 20}
    assert vllm.seen["bad blocks"] == 1, "it was saved anew"


def test_blocks_that_changed_on_the_disk_are_computed(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    vllm.offloader.empty_host()
    assert vllm.directory is not None
    (path,) = vllm.directory.glob("*/slab-00000")
    for slot in range(5):
        flip_bit(path, slot * vllm.host.stride_bytes + 17 * slot)
    assert ask(vllm).num_output == 1
    assert vllm.seen["lost: corrupt"] == 5
    vllm.clock.advance(31.0)
    assert loaded(vllm, ask(vllm)) == {"host": 20}, "and saved anew"


def test_where_the_first_block_cannot_be_loaded_all_is_computed(models: Models) -> None:
    vllm = models()
    first = ask(vllm)
    spoil(vllm, host_slots(vllm, first)[0])
    second = ask(vllm)
    assert second.num_output == 1
    assert vllm.seen["loads"] == 1, "the second try did not go the same way"


def test_a_request_is_not_loaded_for_again_until_a_while_after_a_loss(models: Models) -> None:
    vllm = models(budget=4)
    vllm.clock.freeze()
    first = ask(vllm)
    spoil(vllm, host_slots(vllm, first)[4])
    second = vllm.add(PROMPT, 60)
    while second.num_output < 3:
        vllm.step()
    assert vllm.seen["bad blocks"] == 1
    assert vllm.side.lookup(second, 0) == 0
    other = vllm.add(PROMPT, 1)
    assert vllm.side.lookup(other, 0) >= 16, "others are not barred"
    vllm.clock.advance(29.0)
    assert vllm.side.lookup(second, 0) == 0
    vllm.clock.advance(2.0)
    assert vllm.side.lookup(second, 0) >= 16
    vllm.flush()


def test_a_worker_without_memory_costs_its_blocks_and_nothing_else(models: Models) -> None:
    vllm = models(num_workers=2)
    ask(vllm)
    vllm.workers[1].close()
    vllm.workers[1] = GuardedWorker(lambda _: NoCopier())
    second = ask(vllm)
    assert vllm.seen["loads"] == 1
    assert vllm.seen["bad blocks"] == 5
    assert second.num_output == 1
    fresh = ask(vllm, [30] * 12)
    assert loaded(vllm, fresh) == {}
    assert loaded(vllm, ask(vllm, [30] * 12)) == {}, "half of each block was never saved"


def test_a_load_that_hangs_is_given_up_at_its_deadline(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    vllm.offloader.empty_host()
    request = vllm.add(PROMPT, 1)
    vllm.engine.has_room = lambda link, direction: link is Tier.HOST  # type: ignore[method-assign]
    vllm.step()
    assert request.status == "loading"
    for _ in range(5):
        vllm.step()
    assert request.status == "loading", "the disk does not answer"
    vllm.clock.advance(10.0)
    vllm.run()
    assert request.num_output == 1
    assert vllm.seen["lost: expired"] == 5
    del vllm.engine.has_room


# Aborts.


def test_the_blocks_of_a_request_that_is_aborted_while_loading_are_held_until_it_has_ended(
    models: Models,
) -> None:
    vllm = models()
    ask(vllm)
    request = start_loading(vllm)
    vllm.abort(request)
    for _ in range(3):
        vllm.step()
    assert request.request_id in vllm.requests, "a copy may still write to its blocks"
    assert vllm.side.has_pending_work
    let_go(vllm)
    vllm.run()
    assert not vllm.requests
    assert not vllm.side.has_pending_work


def test_a_request_aborted_while_the_disk_is_read_is_over_at_once(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    vllm.offloader.empty_host()
    request = vllm.add(PROMPT, 1)
    vllm.engine.has_room = lambda link, direction: link is Tier.HOST  # type: ignore[method-assign]
    vllm.step()
    vllm.abort(request)
    assert vllm.side.has_pending_work, "the workers have to be told, or vLLM waits"
    vllm.run(max_steps=5)
    del vllm.engine.has_room


def test_a_request_that_nobody_knows_ends_without_a_word(models: Models) -> None:
    vllm = models()
    assert vllm.side.finished(Request("stranger", PROMPT, 1)) is None


# Lookups.


def test_a_request_that_waits_for_room_is_answered_alike_for_a_while(models: Models) -> None:
    vllm = models()
    ask(vllm)
    vllm.clock.freeze()
    request = vllm.add(PROMPT, 1)
    assert vllm.side.lookup(request, 0) == 20
    vllm.offloader.empty_host()
    assert vllm.side.lookup(request, 0) == 20
    assert vllm.side.lookup(request, 4) == 0, "another question"
    vllm.clock.advance(0.03)
    assert vllm.side.lookup(request, 0) == 0
    vllm.flush()


AWAITS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "one"}


def test_a_prompt_that_another_vllm_computes_is_waited_for(models: Models) -> None:
    vllm = models()
    vllm.clock.freeze()
    waiting = vllm.add(PROMPT, 1)
    waiting.kv_transfer_params = AWAITS
    assert vllm.side.lookup(waiting, 0) is None
    vllm.clock.advance(0.5)
    assert vllm.side.lookup(waiting, 0) is None
    vllm.clock.advance(100)  # nothing has come: it computes
    assert vllm.side.lookup(waiting, 0) == 0
    assert vllm.side.lookup(waiting, 0) == 0, "for good"
    vllm.flush()


def test_what_a_decoder_learns_from_the_ends_of_prompts_does_not_make_it_wait(
    models: Models,
) -> None:
    vllm = models()
    vllm.clock.freeze()
    vllm.side._chooser.costs.observe([(3, 0)], 60.0)  # the first step, on a busy machine
    waiting = vllm.add(PROMPT, 1)
    waiting.kv_transfer_params = AWAITS
    assert vllm.side.lookup(waiting, 0) is None
    vllm.clock.advance(4)
    assert vllm.side.lookup(waiting, 0) is None
    vllm.clock.advance(2)
    assert vllm.side.lookup(waiting, 0) == 0
    vllm.flush()


def test_what_has_come_of_an_awaited_prompt_is_loaded_at_once(models: Models) -> None:
    vllm = models()
    ask(vllm)
    vllm.clock.freeze()
    waiting = vllm.add(PROMPT, 1)
    waiting.kv_transfer_params = AWAITS
    assert vllm.side.lookup(waiting, 0) == 20
    vllm.flush()


def test_what_a_prefiller_left_is_loaded_and_the_rest_computed(models: Models) -> None:
    vllm = models()
    ask(vllm, PROMPT[:12])
    vllm.clock.freeze()
    waiting = vllm.add(PROMPT, 1)
    waiting.kv_transfer_params = AWAITS
    assert vllm.side.lookup(waiting, 0) is None
    vllm.clock.advance(6)
    assert vllm.side.lookup(waiting, 0) == 12
    vllm.flush()
    assert loaded(vllm, waiting) == {"host": 12}


def test_the_answer_of_a_prefiller_is_for_the_decoder(models: Models) -> None:
    vllm = models()
    request = Request("prefill", PROMPT, 1)
    request.kv_transfer_params = {"do_remote_decode": True}
    vllm.side.lookup(request, 0)
    told = vllm.side.finished(request)
    assert told == {"do_remote_prefill": True, "do_remote_decode": False}


def test_a_lookup_counts_once_it_is_acted_upon(models: Models) -> None:
    seen: list[Event] = []
    vllm = models(observers=[seen.append])
    ask(vllm)
    seen.clear()
    request = vllm.add(PROMPT, 1)
    for _ in range(3):
        vllm.side.lookup(request, 0)
    assert not [event for event in seen if isinstance(event, LookedUp)]
    vllm.flush()
    assert [e for e in seen if isinstance(e, LookedUp)] == [LookedUp(5, ((Tier.HOST, 5),))]
    assert [e for e in seen if isinstance(e, Decided)] == [Decided(5, 5, None, None)]


def test_copies_begin_before_all_that_came_at_once_is_looked_up(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = models()
    prompts = [[first, *PROMPT[1:]] for first in range(50, 53)]
    for prompt in prompts:
        ask(vllm, prompt)
    monkeypatch.setattr(lookups, "_ENOUGH_BYTES", 1)
    requests = [vllm.add(prompt, 1) for prompt in prompts]
    begun = [len(vllm.step().orders.loads) for _ in range(2)]
    assert begun == [1, 1]
    assert vllm.seen["asked again"] >= 2
    vllm.run()
    assert [loaded(vllm, request) for request in requests] == [{"host": 20}] * 3


def test_nobody_is_asked_again_before_a_step_that_takes_its_time(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = models()
    ask(vllm)
    ask(vllm, [50, *PROMPT[1:]])
    monkeypatch.setattr(lookups, "_ENOUGH_BYTES", 1)
    vllm.add(range(100, 110), 1)  # to be computed
    requests = [vllm.add(prompt, 1) for prompt in (PROMPT, [50, *PROMPT[1:]])]
    vllm.step()
    assert not vllm.seen["asked again"]
    vllm.run()
    assert [loaded(vllm, request) for request in requests] == [{"host": 20}] * 2


def test_within_a_block_nothing_is_offered(models: Models) -> None:
    vllm = models()
    ask(vllm)
    request = vllm.add(PROMPT, 1)
    assert [vllm.side.lookup(request, past) for past in (0, 1, 4, 7, 20)] == [20, 0, 16, 0, 0]
    vllm.flush()


def test_a_load_that_nobody_offered_is_an_error(models: Models) -> None:
    vllm = models()
    ask(vllm)
    request = Request("r", PROMPT, 1)
    with pytest.raises(BookError, match="8 tokens of a request, but was offered 0"):
        vllm.side.allocated(request, [[0, 1, 2]], 8)
    with pytest.raises(BookError, match="8 tokens of a request, but was offered 0"):
        vllm.side.lookup(request, 0)  # the books are not used after an error


def test_a_load_beyond_what_was_offered_is_an_error(models: Models) -> None:
    vllm = models()
    ask(vllm)
    request = Request("r", PROMPT, 1)
    assert vllm.side.lookup(request, 0) == 20
    with pytest.raises(BookError, match="24 tokens of a request, but was offered 20"):
        vllm.side.allocated(request, [list(range(6))], 24)


def test_steps_that_only_read_prompts_are_timed(models: Models) -> None:
    vllm = models(budget=8)
    vllm.add(PROMPT, 2)
    timed = [vllm.step().orders.is_timed for _ in range(4)]
    assert timed == [True, True, True, False]
    vllm.flush()
    assert not vllm.step().orders.is_timed, "nothing was computed"


def test_what_is_sooner_computed_is_not_offered(models: Models) -> None:
    seen: list[Event] = []
    vllm = models(always_load=False, observers=[seen.append])
    ask(vllm)
    assert loaded(vllm, ask(vllm)) == {"host": 20}, "to load is how rates become known"
    for _ in range(100):
        vllm.side._chooser.costs.observe([(1000, 0)], 1e-6)  # a machine that computes in no time
    seen.clear()
    assert loaded(vllm, ask(vllm)) == {}
    (decided,) = [event for event in seen if isinstance(event, Decided)]
    assert (decided.num_matched, decided.num_loaded) == (5, 0)


# The end.


def test_after_a_reset_nothing_from_before_is_found(models: Models) -> None:
    vllm = models(disk=True)
    first = ask(vllm)
    running = vllm.add([30] * 12, 9)
    vllm.step()
    assert vllm.reset()
    assert loaded(vllm, ask(vllm)) == {}
    assert running.num_output == 9
    assert loaded(vllm, ask(vllm, [30] * 12)) == {}, "what ran across the reset is not kept"
    assert loaded(vllm, ask(vllm)) == {"host": 20}
    vllm.offloader.empty_host()
    assert loaded(vllm, ask(vllm)) == {"disk": 20}
    assert vllm.reset()
    assert loaded(vllm, ask(vllm)) == {}
    assert first.num_output == 1


def test_steps_must_go_on_until_the_workers_have_told_all(models: Models) -> None:
    vllm = models()
    assert not vllm.side.has_pending_work
    vllm.movers[0].gate.clear()
    vllm.add(PROMPT, 1)
    vllm.step()
    for _ in range(3):
        vllm.step()
        assert vllm.side.has_pending_work
    let_go(vllm)
    vllm.run()
    assert not vllm.side.has_pending_work


def test_it_closes_while_workers_still_copy(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    start_loading(vllm)
    vllm.add([30] * 12, 1)
    vllm.step()
    assert vllm.side.close(), "what the workers had is given up"
    vllm.offloader.check()


def test_it_closes_while_the_disk_is_read_for_a_load(models: Models) -> None:
    vllm = models(disk=True)
    ask(vllm)
    vllm.clock.freeze()
    vllm.offloader.empty_host()
    vllm.add(PROMPT, 1)
    vllm.step()
    assert vllm.side.close(), "nobody waits for that load any more"
    vllm.offloader.check()


# Drafts.


# The token sampled in place of a rejected draft is known, but at its place lies the draft's KV.
@pytest.mark.parametrize("how", ["ends", "is aborted", "is preempted"])
def test_the_kv_of_a_rejected_draft_is_not_saved(models: Models, how: str) -> None:
    vllm = models(num_drafts=3)
    vllm.guesses = [49, 49, 49]  # never right
    prompt = PROMPT[:21]
    request = vllm.add(prompt, 3 if how == "ends" else 9)
    while request.num_tokens < 24:  # three tokens are sampled, one a step
        vllm.step()
    assert vllm.seen["drafts rejected"] > 0
    if how == "is aborted":
        vllm.abort(request)
    if how == "is preempted":
        vllm.preempts_next = True
    vllm.flush()
    vllm.audit()


# Where steps overlap, vLLM delivers a token that was computed from a bad block before it heard.
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:20], [*PROMPT, 7]])
def test_no_load_is_part_of_the_step_that_computes_the_rest(
    models: Models, prompt: list[int]
) -> None:
    vllm = models(overlaps=True)
    ask(vllm)
    ask(vllm)  # how fast DRAM is has been seen
    request = vllm.add(prompt, 1)
    step = vllm.step()
    assert step.orders.loads
    assert not step.works
    assert request.status == "loading"
    vllm.flush()
    assert request.num_output == 1


# A full queue is no fault of anybody's.
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_load_that_the_books_refuse_is_computed(models: Models, overlaps: bool) -> None:
    vllm = models(overlaps=overlaps)
    ask(vllm)
    request = vllm.add(PROMPT, 3)
    vllm.offloader._stack._limits = replace(vllm.offloader._stack._limits, max_pending_loads=0)
    vllm.flush()
    assert request.num_output == 3
    assert loaded(vllm, request) == {}


def test_a_load_into_blocks_that_a_reset_took_is_fenced(models: Models) -> None:
    vllm = models(overlaps=True, num_blocks=10)
    ask(vllm, [40] * 40)
    running = vllm.add(PROMPT[:21], 9)
    while running.num_computed_tokens < 24:  # the token that fills the block is not known yet
        vllm.step()
    assert vllm.reset(with_connector=False)
    vllm.add([40] * 40, 1)
    vllm.waiting.rotate(1)  # it is let in first, and takes all blocks
    orders = vllm.side_step()
    written = {slot for load in orders.loads for slot in load.transfer.target_slots}
    before = {order.id for order in orders.saves_before if written.intersection(order.source_slots)}
    assert before
    assert before <= set(orders.fence)


def test_a_request_that_a_reset_preempted_is_not_saved_from_its_new_blocks(models: Models) -> None:
    vllm = models(overlaps=True)
    ask(vllm)
    running = vllm.add(PROMPT[:21], 9)
    while running.num_computed_tokens < 24:  # the token that fills the block is not known yet
        vllm.step()
    assert vllm.reset(with_connector=False)
    assert vllm.step().orders.loads
    vllm.flush()
    vllm.catch_up()
    vllm.audit()


def test_news_remember_no_block_that_was_not_saved(models: Models) -> None:
    news = BlockNews()
    vllm = models(observers=[news], news=news)
    for mover in vllm.movers:
        mover.failing = 1.0
    for number in range(5):
        hashes = [f"{number} {index}" for index in range(5)]
        ask(vllm, [number] * 20, block_hashes=hashes)
    assert news.take() == []
    assert len(news._named) == 0


def test_many_loads_at_once_do_not_make_loading_look_slow() -> None:
    """48 prompts of a gigabyte: the last waits for a second, and loading is still the better."""
    chooser = LoadChooser(2 << 20, 16, always_load=False)
    assert chooser.expect_time(1, [(8192, 0)])
    chooser.computed({1: 0.2})
    match = Match(512, (Run(Tier.HOST, 512),))
    size = 512 * (2 << 20)

    def loading(started: float) -> Loading:
        return Loading("a", TicketId(1), 0, 0, (), 0, Tier.HOST, size, started)

    for number in range(48):
        chooser.waited([loading(0.0)], 0.022 * (number + 1))
    chooser.waited([loading(2.0) for _ in range(48)], 3.1)  # all seen to end in one step
    offer = chooser.choose(0, match, 4.0)
    assert offer.choice.num_blocks == 512


# How this vLLM works.


def test_a_whole_prompt_is_loaded_where_no_part_may_be(models: Models) -> None:
    """MLA on a CPU: vLLM computes what follows a hit wrongly, unless it is one token."""
    vllm = models(ways=Ways(hits_whole_prompts_only=True))
    whole = PROMPT[: 4 * BLOCK_TOKENS]
    ask(vllm)
    assert loaded(vllm, ask(vllm)) == {}, "two tokens would follow"
    assert loaded(vllm, ask(vllm, whole)) == {"host": len(whole)}
    longer = [*whole, *range(100, 100 + BLOCK_TOKENS)]
    assert loaded(vllm, ask(vllm, longer)) == {}, "its last block is not stored"
    assert loaded(vllm, ask(vllm, longer)) == {"host": len(longer)}


@pytest.mark.parametrize("whole_only", [False, True])
def test_only_whole_prompts_are_loaded_after_a_local_hit_too(
    models: Models, whole_only: bool
) -> None:
    vllm = models(ways=Ways(hits_whole_prompts_only=whole_only), is_caching=True)
    whole = PROMPT[: 4 * BLOCK_TOKENS]
    ask(vllm)
    assert vllm.reset(with_connector=False)
    ask(vllm, [*whole[:-1], 7])  # the device holds three blocks of the prompt, DRAM all of them
    hits = vllm.seen["hits"]
    ask(vllm, PROMPT)
    assert vllm.seen["hits"] - hits == (0 if whole_only else 1), "two tokens would follow"


def test_saves_end_in_their_step_where_vllm_overwrites_blocks_early(models: Models) -> None:
    for early in (False, True):
        vllm = models(ways=Ways(writes_reused_blocks_early=early))
        vllm.add(PROMPT, 1)
        orders = vllm.step().orders
        assert orders.ends_saves is early
        vllm.flush()


def test_usually_no_way_is_special() -> None:
    assert not any(Ways())
