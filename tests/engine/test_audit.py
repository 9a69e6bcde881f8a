"""The audit in the engine: finds each planted fault, and nothing where nothing is wrong."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BLOCK_BYTES, BLOCK_TOKENS, idle

from penstock.config import Config, DiskConfig, HostConfig
from penstock.costs.choose import LoadChoice
from penstock.engine.engine import Engine
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.events import Audited, AuditFailed, Event, Quarantined
from penstock.metrics import Metrics

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
Plant = Callable[[torch.Tensor, list[int]], None]


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "penstock"


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def open_(
        loaded: LoadedModel,
        directory: Path | None,
        *,
        share: float = 1.0,
        batch: int = 512,
        num_blocks: int = 64,
        num_host: int = 512,
        residency: ResidencyConfig | None = None,
        observers: tuple[Any, ...] = (),
    ) -> Engine:
        element = loaded.dtype.itemsize
        block_bytes = BLOCK_BYTES * element // 4
        disk = DiskConfig()
        if directory is not None:
            size = 512 * (BLOCK_BYTES + 512) + 65536
            disk = DiskConfig(path=str(directory), size_bytes=size)
        config = EngineConfig(
            num_blocks * block_bytes,
            BLOCK_TOKENS,
            batch,
            residency=residency or ResidencyConfig(),
            audit_share=share,
        )
        tiers = Config(HostConfig(size_bytes=num_host * block_bytes, huge_pages=False), disk)
        engine = Engine(loaded, config, tiers, observers)
        made.append(engine)
        # Load whatever matches: on a busy machine computing may seem faster.
        engine.scheduler._choose = lambda match, num_past: LoadChoice(match.num_blocks)
        return engine

    yield open_
    for engine in made:
        engine.close()


def prompts(num: int = 4, seed: int = 1, length: int = 150) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 40_000) for _ in range(length)] for _ in range(num)]


def ask(engine: Engine, questions: list[list[int]], *, at_once: int = 1) -> list[list[int]]:
    answers: list[list[int]] = []
    for start in range(0, len(questions), at_once):
        requests = [
            engine.add(f"{start}-{number}", ids, GREEDY)
            for number, ids in enumerate(questions[start : start + at_once])
        ]
        while engine.has_work or (engine.audits is not None and engine.audits.is_busy):
            engine.step()
        assert all(request.finish_reason == "length" for request in requests)
        answers += [request.output_ids for request in requests]
    return answers


def fill(engine: Engine, questions: list[list[int]]) -> list[list[int]]:
    """Answer the questions, and leave their KV in the lower tiers."""
    answers = ask(engine, questions)
    assert engine.offloader is not None
    assert engine.offloader.drain(30)
    return answers


def forget(engine: Engine) -> None:
    """Empty the device, so that the next questions are loaded."""
    engine.step()
    engine.pool.forget()


def audited(events: list[Event], check: str) -> int:
    return sum(isinstance(event, Audited) and event.check == check for event in events)


def failures(events: list[Event]) -> list[AuditFailed]:
    return [event for event in events if isinstance(event, AuditFailed)]


def altered(loaded: LoadedModel, change: Callable[[Any], None]) -> LoadedModel:
    """The same model by name and fingerprint, but it computes something else."""
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        change(model)
    return replace(loaded, model=model)


def other_theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    dim = torch.arange(0, 16, 2, dtype=torch.float32) / 16
    rotary.inv_freq.copy_(1.0 / 50_000.0**dim)


def rope_scaled(model: Any) -> None:
    model.model.rotary_emb.inv_freq /= 2


def other_adapter(model: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            down = torch.randn(2, linear.in_features, generator=generator)
            up = torch.randn(linear.out_features, 2, generator=generator)
            linear.weight += 0.01 * up @ down


@pytest.mark.parametrize("change", [other_theta, rope_scaled, other_adapter])
def test_kv_of_another_model_is_found(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path, change: Any
) -> None:
    """As if the namespace did not cover the rope or the adapter."""
    writer = opened(altered(loaded, change), tmp_path / "kv")
    fill(writer, prompts())
    writer.close()
    events: list[Event] = []
    engine = opened(loaded, tmp_path / "kv", observers=(events.append,))
    assert engine.offloader is not None
    engine.offloader.recover()
    right = ask(opened(loaded, None, share=0.0), prompts())
    assert ask(engine, prompts()) == right, "an audited request was answered from stored KV"
    assert len(failures(events)) == 1
    assert audited(events, "computed") == 1, "nothing is audited in quarantine"
    assert engine.offloader.is_quarantined
    idle(engine)


def saved_wrongly(engine: Engine, plant: Plant) -> None:
    """Damage blocks on the device before they are saved: their checksums will be right."""
    assert engine.offloader is not None
    save = engine.offloader.save

    def wrong(keys: Any, source: Any, **options: Any) -> Any:
        plant(engine.device.tensor, [int(slot) for slot in source])
        return save(keys, source, **options)

    engine.offloader.save = wrong  # type: ignore[method-assign]


def shift_tokens(pool: torch.Tensor, slots: list[int]) -> None:
    for slot in slots[1:2]:
        pool[slot] = pool[slot].roll(1, dims=2).clone()


def other_position(pool: torch.Tensor, slots: list[int]) -> None:
    """A stale block: the content of another position."""
    if len(slots) > 3:
        pool[slots[3]] = pool[slots[1]].clone()


def no_layer(pool: torch.Tensor, slots: list[int]) -> None:
    pool[slots, 1] = 0


def one_head(pool: torch.Tensor, slots: list[int]) -> None:
    pool[slots, 2, 1, :, 1] *= 1.01


@pytest.mark.parametrize(
    ("plant", "layer"),
    [(shift_tokens, None), (other_position, None), (no_layer, "1"), (one_head, "2")],
)
def test_blocks_that_were_stored_wrongly_are_found(
    loaded: LoadedModel,
    opened: Callable[..., Engine],
    tmp_path: Path,
    plant: Plant,
    layer: str | None,
) -> None:
    writer = opened(loaded, tmp_path / "kv", share=0.0)
    saved_wrongly(writer, plant)
    fill(writer, prompts())
    writer.close()
    events: list[Event] = []
    engine = opened(loaded, tmp_path / "kv", observers=(events.append,))
    assert engine.offloader is not None
    engine.offloader.recover()
    right = ask(opened(loaded, None, share=0.0), prompts())
    assert ask(engine, prompts()) == right
    assert failures(events)
    report = read_report(tmp_path / "kv")
    assert report["model"] == "tiny"
    assert {finding["tier"] for finding in report["findings"]} == {"disk"}
    if layer is not None:
        assert {finding["layer"] for finding in report["findings"]} == {layer}
    if plant is one_head:
        assert {(f["part"], f["head"]) for f in report["findings"]} == {("V", 1)}
    if plant is other_position:
        assert {finding["block"] for finding in report["findings"]} == {3}


def test_kv_of_another_picture_is_found(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path
) -> None:
    """As if keys did not cover a picture: other tokens in the middle, the same keys."""
    writer = opened(loaded, tmp_path / "kv", share=0.0)
    for number, ids in enumerate(prompts()):
        request = writer.add(str(number), ids, GREEDY)
        request.tokens[40:60] = prompts(seed=9)[number][:20]
        while writer.has_work:
            writer.step()
    writer.close()
    events: list[Event] = []
    engine = opened(loaded, tmp_path / "kv", observers=(events.append,))
    assert engine.offloader is not None
    engine.offloader.recover()
    ask(engine, prompts())
    assert failures(events)


def read_report(folder: Path) -> Any:
    (path,) = folder.glob("quarantine-*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("plant", [no_layer, other_position, shift_tokens])
def test_blocks_that_are_not_restored_are_found_bit_by_bit(
    loaded: LoadedModel,
    opened: Callable[..., Engine],
    tmp_path: Path,
    plant: Plant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is stored is right, but it does not arrive on the device as it is."""
    events: list[Event] = []
    engine = opened(loaded, tmp_path / "kv", observers=(events.append,))
    assert engine.audits is not None
    fill(engine, prompts())
    forget(engine)
    # Draw no request for computing, but every one for reading back.
    monkeypatch.setattr(engine.audits, "choosing", lambda request, choose: choose)
    settle = engine.scheduler.settle

    def damaged(done: Any) -> Any:
        loading = engine.scheduler._loading.get(done.ticket)
        if loading is not None:
            plant(engine.device.tensor, [int(slot) for slot in loading.into if slot is not None])
        return settle(done)

    monkeypatch.setattr(engine.scheduler, "settle", damaged)
    ask(engine, prompts())
    assert failures(events) == [AuditFailed("read_back", failures(events)[0].place)]
    assert {finding["tolerance"] for finding in read_report(tmp_path / "kv")["findings"]} == {0.0}
    # Those that come later are computed.
    right = ask(opened(loaded, None, share=0.0), prompts())
    assert ask(engine, prompts()) == right
    idle(engine)


def test_a_quarantine_outlasts_the_process_until_its_file_is_deleted(
    loaded: LoadedModel,
    opened: Callable[..., Engine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = opened(altered(loaded, rope_scaled), tmp_path / "kv", share=0.0)
    fill(writer, prompts())
    writer.close()
    first = opened(loaded, tmp_path / "kv")
    assert first.offloader is not None
    first.offloader.recover()
    ask(first, prompts())
    assert first.offloader.is_quarantined
    first.close()
    (path,) = (tmp_path / "kv").glob("quarantine-*.json")
    assert str(path) in caplog.text
    assert "AUDIT FAILED" in caplog.text

    caplog.clear()
    metrics = Metrics()
    second = opened(loaded, tmp_path / "kv", share=0.0, observers=(metrics,))
    assert second.offloader is not None
    second.offloader.recover()
    right = ask(opened(loaded, None, share=0.0), prompts())
    assert ask(second, prompts()) == right
    forget(second)
    assert ask(second, prompts()) == right
    assert "is in quarantine" in caplog.text
    assert str(path) in caplog.text
    assert b"penstock_quarantined 1.0" in metrics.expose()
    idle(second)
    second.close()

    path.unlink()
    third = opened(loaded, tmp_path / "kv", share=0.0)
    assert third.offloader is not None
    third.offloader.recover()
    assert not third.offloader.is_quarantined
    assert third.offloader.match(first_keys(third)).num_blocks > 0


def first_keys(engine: Engine) -> Any:
    from penstock.keys import chain

    return chain(engine.namespace, prompts()[0])


def test_without_a_disk_the_report_is_in_the_state_folder(
    loaded: LoadedModel, opened: Callable[..., Engine], state_home: Path
) -> None:
    engine = opened(loaded, None)
    saved_wrongly(engine, no_layer)
    fill(engine, prompts())
    forget(engine)
    assert engine.offloader is not None
    del engine.offloader.save  # the fault is over, but what was stored stays wrong
    ask(engine, prompts())
    assert engine.offloader.is_quarantined
    assert read_report(state_home)["findings"]
    # Nothing of this process is left, so the next one begins anew.
    again = opened(loaded, None)
    assert again.offloader is not None
    assert not again.offloader.is_quarantined


def test_in_quarantine_long_sequences_still_use_dram(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path
) -> None:
    """Sequences larger than the device run, although nothing is offered to other requests."""
    residency = ResidencyConfig(prefix_tokens=16, tail_tokens=16)
    engine = opened(
        loaded, tmp_path / "kv", share=0.0, num_blocks=12, batch=64, residency=residency
    )
    assert engine.offloader is not None
    fill(engine, prompts())
    engine.offloader.quarantine()
    long = prompts(2, seed=5, length=300)
    assert ask(engine, long) == ask(opened(loaded, None, share=0.0, num_blocks=128), long)
    assert engine.scheduler.placement.num_left > 0
    idle(engine)


def test_a_failure_in_the_middle_of_requests_that_loaded_computes_them_again(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path
) -> None:
    right = ask(opened(loaded, None, share=0.0), prompts(8))
    writer = opened(altered(loaded, rope_scaled), tmp_path / "kv", share=0.0)
    fill(writer, prompts(8))
    writer.close()
    engine = opened(loaded, tmp_path / "kv")
    assert engine.offloader is not None
    engine.offloader.recover()
    ask(engine, prompts(8), at_once=8)  # two are audited, the others load wrong KV
    assert engine.offloader.is_quarantined
    assert engine.scheduler.num_preemptions > 0
    assert ask(engine, prompts(8), at_once=8) == right, "the device kept KV that was loaded"
    idle(engine)


def test_what_is_being_loaded_when_an_audit_fails_is_not_used(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path
) -> None:
    right = ask(opened(loaded, None, share=0.0), prompts())
    writer = opened(altered(loaded, rope_scaled), tmp_path / "kv", share=0.0)
    fill(writer, prompts())
    writer.close()
    engine = opened(loaded, tmp_path / "kv", share=0.0)
    assert engine.offloader is not None
    engine.offloader.recover()
    requests = [engine.add(str(number), ids, GREEDY) for number, ids in enumerate(prompts())]
    engine.step()
    assert engine.scheduler.num_loading == len(requests)
    assert engine.offloader.drain(30)  # the loads have ended, and nobody knows yet
    engine.offloader.quarantine()
    engine._distrust()
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == right
    idle(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batches", [(512, 37), (48, 512), (16, 100)])
def test_nothing_is_found_whatever_the_batch_shape(
    loaded: LoadedModel,
    opened: Callable[..., Engine],
    tmp_path: Path,
    dtype: torch.dtype,
    batches: tuple[int, int],
) -> None:
    model = loaded
    if dtype is not torch.float32:
        model = replace(loaded, model=copy.deepcopy(loaded.model).to(dtype), dtype=dtype)
    events: list[Event] = []
    writer = opened(model, tmp_path / "kv", batch=batches[0], observers=(events.append,))
    questions = prompts(6)
    fill(writer, questions)
    # Second turns: their blocks were written token by token.
    questions = [
        ids + answer for ids, answer in zip(questions, fill(writer, questions), strict=True)
    ]
    writer.close()
    engine = opened(model, tmp_path / "kv", batch=batches[1], observers=(events.append,))
    assert engine.offloader is not None
    engine.offloader.recover()
    for at_once in (1, 3, 6):
        ask(engine, questions, at_once=at_once)
        forget(engine)
    found = engine.audits._auditor.findings if engine.audits is not None else []
    assert [finding.describe() for finding in found] == []
    assert failures(events) == []
    assert audited(events, "computed") >= 10
    idle(engine)


def test_both_checks_run_and_are_counted(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path
) -> None:
    metrics = Metrics()
    events: list[Event] = []
    engine = opened(loaded, tmp_path / "kv", share=0.5, observers=(events.append, metrics))
    for _ in range(100):  # which requests are drawn is random
        ask(engine, prompts())
        forget(engine)
        if min(audited(events, check) for check in ("computed", "read_back")) > 2:
            break
    else:
        pytest.fail("a check hardly ever runs")
    assert failures(events) == []
    assert not any(isinstance(event, Quarantined) for event in events)
    text = metrics.expose().decode()
    count = audited(events, "read_back")
    assert f'penstock_audited_requests_total{{check="read_back"}} {count}.0' in text
    assert 'penstock_audit_failures_total{check="computed"} 0.0' in text
    idle(engine)


def test_audit_blocks_are_gone_afterwards_and_never_reach_the_disk(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = opened(loaded, tmp_path / "kv")
    assert engine.offloader is not None
    fill(engine, prompts())
    forget(engine)
    stack = engine.offloader._stack
    before = [set(ledger.held) for _, ledger in stack.ledgers]
    fill(engine, prompts())
    assert [set(ledger.held) for _, ledger in stack.ledgers] == before


def test_audit_off_costs_nothing(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    engine = opened(loaded, tmp_path / "kv", share=0.0)
    assert engine.audits is None
    assert not engine._tolerance.is_calibrated
    assert "audits" not in caplog.text


def test_aborts_and_preemptions_leave_nothing_behind(
    loaded: LoadedModel, opened: Callable[..., Engine], tmp_path: Path
) -> None:
    events: list[Event] = []
    engine = opened(
        loaded,
        tmp_path / "kv",
        num_blocks=24,
        num_host=64,
        batch=40,
        residency=ResidencyConfig(cold=False),
        observers=(events.append,),
    )
    rng = random.Random(3)
    for _ in range(12):
        live = [str(number) for number in range(6)]
        for name, ids in zip(live, prompts(6), strict=True):
            engine.add(name, ids, GREEDY)
        while engine.has_work:
            if live and rng.random() < 0.1:
                engine.abort(live.pop(rng.randrange(len(live))))
            engine.step()
        while not engine.scheduler.idle or (engine.audits and engine.audits.is_busy):
            engine.step()
        idle(engine)
        forget(engine)
    assert audited(events, "computed") > 3
    assert failures(events) == []
