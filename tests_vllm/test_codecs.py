"""Blocks that are packed in DRAM and on disk come back to the bit; KV in fp8 does too.

On a CPU DRAM holds blocks as they are unless a codec is set. On a GPU these are the defaults.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, Faults, Start, Started, Tokens, Vllm, half, tokens
from group_checks import NUM_GROWING, Bits, Case
from tiny import VOCABULARY, make_tiny

from penstock.offload import Offloader
from penstock.types import Tier

PACKED = {"host.codec": "lossless", "disk.codec": "lossless"}


def _cpu_has(flag: str) -> bool:
    return flag in Path("/proc/cpuinfo").read_text()


pytestmark = pytest.mark.skipif(half() != "bfloat16", reason="no bfloat16 on this CPU")


def offloader(vllm: Vllm) -> Offloader:
    """That of an engine within this process."""
    connector = vllm.llm.llm_engine.engine_core.engine_core.scheduler.connector
    return connector._scheduler.side._offloader  # type: ignore[no-any-return]


def codecs(vllm: Vllm) -> tuple[str, str]:
    found = offloader(vllm).codecs
    return found[Tier.HOST], found[Tier.DISK]


def ratio(vllm: Vllm) -> float:
    tiers = offloader(vllm)
    return tiers.host_block_bytes / tiers.host_codec.raw_bytes


def ask(vllm: Vllm, prompt: Tokens, num: int = 12) -> tuple[Tokens, Bits, dict[str, int]]:
    output = vllm.ask([prompt], num, detokenize=False, logprobs=5)[0]
    told = (output.kv_transfer_params or {}).get("penstock", {})
    made = output.outputs[0]
    bits = [{token: seen.logprob for token, seen in one.items()} for one in made.logprobs]
    return list(made.token_ids), bits, told.get("loaded_tokens", {})


def check_hits(vllm: Vllm, faults: Faults, prompts: list[Tokens]) -> list[tuple[Tokens, Bits]]:
    """Hits in DRAM and on disk have the bits of vLLM's own hits, which are returned."""
    local = []
    for prompt in prompts:
        assert ask(vllm, prompt)[2] == {}
        *own, loaded = ask(vllm, prompt)
        assert loaded == {}
        local.append((own[0], own[1]))
    for source in ("host", "disk"):
        vllm.forget()
        if source == "disk":
            faults.empty_host()
        check_all_from(vllm, source, prompts, local)
    return local


def check_all_from(
    vllm: Vllm, source: str, prompts: list[Tokens], local: list[tuple[Tokens, Bits]]
) -> None:
    for prompt, (answer, bits) in zip(prompts, local, strict=True):
        *hit, loaded = ask(vllm, prompt)
        assert loaded == {source: len(prompt) // BLOCK * BLOCK}
        assert hit == [answer, bits]


# A real model.


def test_smollm2_from_dram_from_disk_after_a_restart_and_after_preemptions(
    start: Start, faults: Faults, tmp_path: Path
) -> None:
    faults.set()
    given = {"dtype": "bfloat16", "in_process": True}
    options: dict[str, Any] = {"disk": tmp_path / "kv", "set": PACKED, "always_load": True}
    vllm = start(given=given, **options)
    assert codecs(vllm) == ("lossless", "lossless")
    assert ratio(vllm) < 0.78
    prompts = [tokens(5 * BLOCK + 5, 1)]
    local = check_hits(vllm, faults, prompts)
    assert not offloader(vllm)._told_unfit
    vllm.close()
    small = {"num_gpu_blocks_override": 9, "max_model_len": 256}
    again = start(given={**given, **small}, **options)
    check_all_from(again, "disk", prompts, local)
    # Two of five blocks want room: there are 8, and one that vLLM keeps for itself.
    growing = [tokens(3 * BLOCK - 3 * seed, 20 + seed) for seed in range(2)]
    again.answers(growing, BLOCK + 8, detokenize=False)
    # Whether a preempted request is loaded depends on whether its save has ended by then.
    assert again.metric("vllm:num_preemptions") > 0
    assert not offloader(again)._told_unfit
    again.check_nothing_is_held()
    # Whatever was saved meanwhile, a hit still has the bits it had.
    again.forget()
    check_all_from(again, "host", prompts, local)
    again.close()


# Windows and states.


class TestGroups:
    @pytest.fixture(scope="class", params=["gemma3", "lfm2"])
    def name(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(scope="class")
    def started(self, name: str) -> Started:
        more: dict[str, Any] = {"dtype": "bfloat16"}
        if name == "lfm2":
            more["mamba_cache_dtype"] = "auto"
        return name, more, {"PENSTOCK_HOST_CODEC": "lossless"}

    @pytest.fixture(scope="class")
    def case(
        self,
        started: Started,
        models: Path,
        faults: Faults,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[Case]:
        from group_models import MODELS

        faults.set()
        name, more, environment = started
        disk = tmp_path_factory.mktemp("disk") / "kv"
        case = Case(MODELS[name], models, disk, faults, more, environment)
        yield case
        case.close()

    def test_hits_in_dram_and_on_disk_have_the_bits_of_vllms_own(self, case: Case) -> None:
        _ = case.first
        assert codecs(case.vllm) == ("lossless", "lossless")
        assert ratio(case.vllm) < 0.78
        case.vllm.forget()
        case.all_hit(source="host")
        case.vllm.forget()
        case.faults.empty_host()
        case.all_hit(source="disk")
        assert not offloader(case.vllm)._told_unfit

    def test_a_restart_finds_the_same_bits_even_with_preemptions(self, case: Case) -> None:
        _ = case.first
        case.restart()
        case.all_hit(source="disk")
        case.vllm.answers(case.growing_prompts(), NUM_GROWING, detokenize=False)
        assert case.vllm.metric("vllm:num_preemptions") > 0
        case.vllm.check_nothing_is_held()
        case.vllm.forget()
        case.all_hit(source="host")


# Other settings.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return {"model": str(folder), "skip_tokenizer_init": True}


PROMPTS = [[(7 * n + 3 * seed) % VOCABULARY for n in range(6 * BLOCK + 3)] for seed in range(2)]


def test_a_packed_disk_below_dram_that_holds_blocks_as_they_are(
    start: Start, faults: Faults, tiny: dict[str, Any], tmp_path: Path
) -> None:
    faults.set()
    given = {**tiny, "dtype": "bfloat16", "in_process": True}
    options: dict[str, Any] = {"disk": tmp_path / "kv", "set": {"disk.codec": "lossless"}}
    vllm = start(given=given, always_load=True, **options)
    assert codecs(vllm) == ("raw", "lossless")
    check_hits(vllm, faults, PROMPTS)
    vllm.close()


def test_a_codec_that_does_not_apply_is_refused(
    start: Start, faults: Faults, tiny: dict[str, Any], tmp_path: Path
) -> None:
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    from penstock.errors import ConfigError

    given = {**tiny, "dtype": "float32", "in_process": True}
    try:
        with pytest.raises(ConfigError, match=r"host\.codec.*packs bfloat16, .* is float32"):
            start(given=given, set={"host.codec": "lossless"})
    finally:
        ensure_kv_transfer_shutdown()  # vLLM would use the same connector for the next engine


# vLLM's own quantized KV.


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not _cpu_has("avx512f"),
    reason="vLLM needs AVX-512 for KV in fp8 on a CPU",
)
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_kv_in_fp8(
    start: Start, faults: Faults, tiny: dict[str, Any], tmp_path: Path, dtype: str
) -> None:
    faults.set()
    given = {**tiny, "dtype": "bfloat16", "kv_cache_dtype": dtype, "in_process": True}
    vllm = start(disk=tmp_path / "kv", given=given, always_load=True)
    assert codecs(vllm) == ("raw", "raw")
    assert "packs bfloat16" in _why_not_lossless(vllm)
    check_hits(vllm, faults, PROMPTS)
    vllm.close()


def _why_not_lossless(vllm: Vllm) -> str:
    from penstock.connectors.vllm.values import block_values

    connector = vllm.llm.llm_engine.engine_core.engine_core.scheduler.connector
    assert os.getpid() == connector._shards[0].process
    return block_values(connector._shards).why_not("lossless")
