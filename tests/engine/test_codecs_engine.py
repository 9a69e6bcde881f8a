"""The engine with packed tiers: the same tokens and log probabilities, and an end in every case."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import always_load, idle
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.codecs.lossless import LosslessCodec
from penstock.config import Config, DiskConfig, HostConfig
from penstock.engine.attention.torch import NAME, register
from penstock.engine.engine import Engine
from penstock.engine.lossy import LossyBlocks
from penstock.engine.models import LoadedModel
from penstock.engine.params import SamplingParams
from penstock.engine.parts import EngineConfig
from penstock.engine.residency import ResidencyConfig
from penstock.events import Audited, AuditFailed, Event, Finished, Observer, Quarantined
from penstock.types import Slot, Tier

LAYERS, HEADS, KV_HEADS, DIM, TOKENS = 2, 4, 2, 64, 16
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * DIM * 2 * TOKENS
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
SMALL = ResidencyConfig(prefix_tokens=16, tail_tokens=16)
MAX_STEPS = 3000

Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def packable(tokenizer: Any) -> LoadedModel:
    """A small random model in bfloat16, with heads that the lossless codec packs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    register()
    model.config._attn_implementation = NAME
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name="packable",
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        max_tokens=2048,
        vocab_size=len(tokenizer),
        eos_token_ids=frozenset({0}),
        dtype=torch.bfloat16,
        weights_fingerprint="packable",
        rope="",
    )


@pytest.fixture
def engines(packable: LoadedModel) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(
        num_blocks: int,
        host: str = "lossless",
        disk: str = "auto",
        *,
        path: Path | None = None,
        num_host: int = 256,
        residency: ResidencyConfig = SMALL,
        audit_share: float = 0.0,
        observers: tuple[Observer, ...] = (),
    ) -> Engine:
        config = EngineConfig(
            num_blocks * BLOCK_BYTES, TOKENS, 64, residency=residency, audit_share=audit_share
        )
        below = DiskConfig()
        if path is not None:
            below = DiskConfig(path=str(path), size_bytes=1024 * (BLOCK_BYTES + 512), codec=disk)
        tiers = Config(HostConfig(size_bytes=num_host * BLOCK_BYTES, codec=host), below)
        made.append(Engine(packable, config, tiers, observers=observers))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts(num: int, longest: int = 200, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1, 40_000) for _ in range(40)]
    return [
        head + [rng.randrange(1, 40_000) for _ in range(rng.randint(longest // 2, longest))]
        for _ in range(num)
    ]


def run(engine: Engine, questions: list[list[int]]) -> list[Any]:
    """How each request ended, and its tokens with their log probabilities."""
    requests = [engine.add(str(number), ids, PARAMS) for number, ids in enumerate(questions)]
    found: dict[str, list[Any]] = {request.id: [] for request in requests}
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        for progress in engine.step():
            found[progress.request.id].append(progress.sampled)
    assert not engine.has_work, "one never ends"
    idle(engine)
    return [(request.finish_reason, found[request.id]) for request in requests]


def refuse(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Let this share of all blocks, evenly spread, not fit the lossless codec."""
    pack = LosslessCodec.pack
    numbers: dict[bytes, int] = {}  # by content

    def pack_some(codec: LosslessCodec, raw: memoryview, packed: memoryview) -> bool:
        number = numbers.setdefault(bytes(raw[: codec.raw_bytes]), len(numbers))
        is_unfit = int((number + 1) * share) > int(number * share)
        return not is_unfit and pack(codec, raw, packed)

    monkeypatch.setattr(LosslessCodec, "pack", pack_some)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
def test_a_sequence_larger_than_the_device_ends_although_blocks_do_not_fit(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    refuse(monkeypatch, share)
    engine = engines(10)
    found = run(engine, [*prompts(1, 600), *prompts(2, 60)])
    assert [reason for reason, _ in found[1:]] == ["length", "length"]
    failed = engine.take_failed()
    if share < 0.2:
        assert found[0][0] == "length"
        assert not failed
        return
    ((request, fault),) = failed
    assert request.id == "0"
    assert found[0][0] == "error"
    assert 'Set host.codec to "raw"' in str(fault)
    assert run(engine, prompts(1, 60))[0][0] == "length"


@pytest.mark.parametrize("disk", ["auto", "raw", "lossless"])
def test_packed_tiers_change_no_bit(engines: Engines, tmp_path: Path, disk: str) -> None:
    """One request at a time, so that all batches have the same shapes."""

    def ask(engine: Engine) -> list[Any]:
        always_load(engine)
        return [run(engine, [question])[0] for question in prompts(3, 300)]

    def life(host: str, disk: str) -> list[list[Any]]:
        path = tmp_path / f"{host}-{disk}"
        answers = []
        engine = engines(10, host, disk, path=path)  # smaller than a prompt: most of it is cold
        answers.append(ask(engine))
        assert engine.scheduler.placement.num_left > 0
        answers.append(ask(engine))  # from DRAM
        offloader = engine.offloader
        assert offloader is not None
        assert offloader.drain(30)
        offloader.empty_host()
        answers.append(ask(engine))  # from disk
        engine.close()
        engine = engines(64, host, disk, path=path)
        assert engine.offloader is not None
        engine.offloader.recover()
        answers.append(ask(engine))  # after a restart, and hot
        assert engine.offloader.codecs[Tier.HOST] == host
        return answers

    wanted, found = life("raw", "raw"), life("lossless", disk)
    assert found == wanted


@pytest.mark.parametrize(
    ("host", "disk"), [("int4", "auto"), ("int8", "raw"), ("fp8", "raw"), ("raw", "int4")]
)
def test_lossy_tiers_are_served_and_not_audited(
    engines: Engines,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    host: str,
    disk: str,
) -> None:
    events: list[Event] = []
    engine = engines(64, host, disk, path=tmp_path, audit_share=1.0, observers=(events.append,))
    assert "nothing is audited" in caplog.text
    always_load(engine)
    questions = prompts(2, 300)
    run(engine, questions)
    assert engine.offloader is not None
    for _ in range(2):
        assert engine.offloader.drain(30)
        if host == "raw":
            engine.offloader.empty_host()
        engine.pool.distrust()
        assert [reason for reason, _ in run(engine, questions)] == ["length", "length"]
    served = [event for event in events if isinstance(event, Finished)]
    assert [bool(event.num_lossy) for event in served] == [False] * 2 + [True] * 4
    assert not [event for event in events if isinstance(event, Audited | Quarantined)]


def test_an_audit_of_packed_blocks_finds_nothing(engines: Engines, tmp_path: Path) -> None:
    events: list[Event] = []
    engine = engines(64, path=tmp_path, audit_share=1.0, observers=(events.append,))
    always_load(engine)
    run(engine, prompts(2, 300))
    for _ in range(3):
        engine.pool.distrust()
        run(engine, prompts(2, 300))
        assert engine.audits is not None
        while engine.audits.is_busy:
            engine.audits.wait(1.0)
            engine.step()
    assert [event for event in events if isinstance(event, Audited)]
    assert not [event for event in events if isinstance(event, AuditFailed | Quarantined)]


def test_slots_of_blocks_that_return_from_dram_are_noted_as_lossy(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Slot] = []
    monkeypatch.setattr(LossyBlocks, "returned", lambda _, slot: noted.append(slot))
    engine = engines(16, "raw", "int4", path=tmp_path)
    always_load(engine)
    for _ in range(2):
        run(engine, prompts(4, 300))
    assert engine.scheduler.placement.num_returned > 0
    assert noted
