"""Both sides of the connector under a small vLLM, with tiers that hold packed blocks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from connectors.group_model import GroupVllm
from connectors.memory_model import BLOCK_TOKENS, PACKABLE
from connectors.test_group_sides import MIXES
from connectors.users_model import live
from connectors.vllm_model import Vllm

from penstock.connectors.vllm import lookups
from penstock.offload import Offloader
from penstock.types import KEY_BYTES, Slot, Tier

SOME_UNFIT = replace(PACKABLE, num_unfit=6)  # tokens in 256: one block in ten
ALL_UNFIT = replace(PACKABLE, num_unfit=256)
LOSSLESS = {"codec": "lossless"}
PROMPT = [(7 * n) % 50 for n in range(5 * BLOCK_TOKENS + 2)]

Models = Callable[..., Vllm]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """Makes models; each is closed at the end, and must close cleanly."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(lookups, "_ENOUGH_BYTES", 4 * PACKABLE.part_bytes)
    made: list[Vllm] = []

    def make(mix: str = "", *, folder: str = "", **options: Any) -> Vllm:
        directory = tmp_path / (folder or f"kv {len(made)}")
        options = {"shape": PACKABLE, **options}
        if mix:
            options = {"num_host": 40, **options}
            made.append(GroupVllm(directory, MIXES[mix], **options))
        else:
            made.append(Vllm(directory, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
        model.audit()


def ask(vllm: Vllm, prompt: list[int] = PROMPT) -> dict[str, int]:
    """Returns how many tokens were loaded, by tier. Nothing is left on the device."""
    request = vllm.add(prompt, 2)
    vllm.flush()
    assert vllm.reset(with_connector=False)
    answer = vllm.answers[request.request_id]
    found: dict[str, int] = {} if answer is None else answer["penstock"]["loaded_tokens"]
    return found


EXPECTED = ("blocks saved", "blocks checked", "blocks from disk", "preempted", "lost: unfit")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(LOSSLESS, id="lossless"),
        pytest.param({**LOSSLESS, "num_workers": 2, "overlaps": True}, id="two workers overlap"),
        pytest.param({**LOSSLESS, "disk_codec": "raw"}, id="lossless over raw"),
        pytest.param({"disk_codec": "lossless"}, id="raw over lossless"),
        pytest.param({**LOSSLESS, "num_drafts": 2}, id="drafts"),
    ],
)
def test_whatever_happens_no_wrong_block_is_kept_loaded_or_computed_from(
    models: Models, options: dict[str, Any]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(2):
        vllm = models(seed=seed, shape=SOME_UNFIT, **options)
        live(vllm, seed, 120)
        assert vllm.scheduler.side is not None, "an error has ended offloading"
        seen += vllm.seen
    missing = [name for name in EXPECTED if not seen[name]]
    assert not missing, f"the test hardly tests: {sorted(seen.items())}"


@pytest.mark.parametrize(
    "mix", ["full and window", "full and chunk", "full, window and state", "wide full and window"]
)
@pytest.mark.parametrize("options", [{}, {"overlaps": True, "num_workers": 2}])
def test_nor_with_several_groups(models: Models, mix: str, options: dict[str, Any]) -> None:
    vllm = models(mix, shape=SOME_UNFIT, **LOSSLESS, **options)
    live(vllm, 1, 120)
    assert vllm.scheduler.side is not None, "an error has ended offloading"
    expected = ("blocks saved", "loads", "blocks checked", "lost: unfit")
    missing = [name for name in expected if not vllm.seen[name]]
    assert not missing, f"the test hardly tests: {sorted(vllm.seen.items())}"


def test_packed_blocks_are_smaller_and_come_back(models: Models) -> None:
    vllm = models(**LOSSLESS)
    assert vllm.host.block_bytes < 0.78 * PACKABLE.part_bytes
    assert ask(vllm) == {}
    assert ask(vllm) == {"host": 5 * BLOCK_TOKENS}
    vllm.offloader.empty_host()
    assert ask(vllm) == {"disk": 5 * BLOCK_TOKENS}


def test_an_answer_says_how_many_of_its_tokens_may_be_lossy(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = models()
    ask(vllm)
    codecs = {Tier.HOST: "raw", Tier.DISK: "int8"}
    monkeypatch.setattr(Offloader, "codecs", property(lambda _: codecs))
    request = vllm.add(PROMPT, 2)
    vllm.flush()
    assert vllm.answers[request.request_id] == {
        # DRAM may have its blocks from the disk.
        "penstock": {
            "loaded_tokens": {"host": 5 * BLOCK_TOKENS},
            "lossy_tokens": 5 * BLOCK_TOKENS,
        }
    }


def test_the_orders_name_the_codec(models: Models) -> None:
    assert models(**LOSSLESS).side_step().codec == "lossless"
    assert models().side_step().codec == "raw"


def test_a_restart_finds_packed_blocks_and_another_codec_finds_none(models: Models) -> None:
    vllm = models(folder="kv", **LOSSLESS)
    ask(vllm)
    vllm.close()
    same = models(folder="kv", truth=vllm.truth, **LOSSLESS)
    assert ask(same) == {"disk": 5 * BLOCK_TOKENS}
    same.close()
    other = models(folder="kv", truth=vllm.truth)
    assert ask(other) == {}


# Blocks that do not fit.


def test_an_unfit_block_is_told_once_and_not_kept(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = models(shape=ALL_UNFIT, **LOSSLESS)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert ask(vllm) == {}
    # One attempt per block and request.
    assert vllm.seen["lost: unfit"] == 3 * 5
    assert vllm.seen["blocks saved"] == 0
    told = [record.getMessage() for record in caplog.records if "do not fit" in record.message]
    assert len(told) == 1
    assert 'set host.codec to "raw"' in told[0]


@pytest.mark.parametrize("mix", ["full and window", "full and state", "full and chunk"])
def test_a_checkpoint_with_an_unfit_block_does_not_count_as_kept(models: Models, mix: str) -> None:
    vllm = models(mix, shape=ALL_UNFIT, **LOSSLESS)
    assert ask(vllm) == {}
    assert vllm.seen["lost: unfit"] > 0
    boundaries = vllm.side._checkpoints.boundaries
    assert not boundaries._tracked
    assert sum(boundaries._held_bytes.values()) == 0
    assert len(vllm.offloader._stack.checkpoints) == 0
    assert ask(vllm) == {}


def test_a_stored_block_that_does_not_fit_dram_is_a_miss_and_not_tried_again(
    models: Models,
) -> None:
    vllm = models(folder="kv", shape=ALL_UNFIT)  # DRAM and disk hold blocks as they are
    ask(vllm)
    vllm.close()
    other = models(
        folder="kv", shape=ALL_UNFIT, truth=vllm.truth, codec="lossless", disk_codec="raw"
    )
    other.add(PROMPT, 2)
    other.flush()
    assert other.seen["bad blocks"] == 5
    num_unfit = other.seen["lost: unfit"]
    assert num_unfit <= 2 * 5  # loaded from disk, then saved after they were computed
    assert other.offloader.where(other.ended[0].chain.keys) == [None] * 6
    assert ask(other, PROMPT[:-1]) == {}


# Audits.


def test_an_audit_compares_unpacked_blocks(models: Models) -> None:
    vllm = models(audit_share=1.0, **LOSSLESS)
    ask(vllm)
    ask(vllm)  # is computed, and compared
    vllm.side._audits.draws = lambda *_: False  # type: ignore[method-assign]
    assert ask(vllm) == {"host": 5 * BLOCK_TOKENS}  # is loaded, and read back
    settle(vllm)
    assert vllm.seen["audits: computed"] == vllm.seen["audits: read_back"] == 1
    assert vllm.auditor is not None
    assert vllm.auditor.findings == []


def test_an_audit_finds_a_packed_block_that_is_wrong(models: Models) -> None:
    vllm = models(audit_share=1.0, num_host=200, **LOSSLESS)
    ask(vllm)
    slot = next(slot for slot in range(vllm.host.num_slots) if any(seal(vllm, slot)))
    view = vllm.host.view(Slot(slot))
    view[100:300] = bytes(byte ^ 0xDA for byte in view[100:300])  # signs and mantissas
    ask(vllm)
    settle(vllm)
    assert vllm.seen["failed audits: computed"] == vllm.seen["quarantined"] == 1


def seal(vllm: Vllm, slot: int) -> bytes:
    return bytes(vllm.host.seals[KEY_BYTES * slot : KEY_BYTES * (slot + 1)])


def settle(vllm: Vllm) -> None:
    for _ in range(1000):
        if not vllm.side._audits.is_busy:
            break
        vllm.step()
        vllm.flush()
    assert not vllm.side._audits.is_busy
    assert vllm.offloader.codecs[Tier.HOST] == "lossless"
