"""The planner's arithmetic, held against known figures and those measured on one H200."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.plan.decode_cost import decode_cost
from penstock.plan.fit import Demand, Hardware, Layout, fit, num_copies
from penstock.plan.planner import Plan, PlannedModel, make_plan
from penstock.plan.verdict import PlanKind
from penstock.plan.ways import Mode
from penstock.shapes.catalog import GPUS, MODELS, find_gpu, find_model
from penstock.shapes.gpu_rates import rates_from_table, with_prefill, with_probe
from penstock.shapes.shape import ModelShape
from penstock.shapes.sizing import PRESETS
from penstock.types import Tier
from penstock.units import GiB

H200 = find_gpu("h200")
LLAMA_8B = MODELS["llama-3.1-8b"]
# Plain arithmetic is easier to follow with KV that is not packed. Packed KV has tests of its own.
raw_hardware = partial(Hardware, host_codec="raw")


def planned(name: str, **shape: Any) -> PlannedModel:
    from dataclasses import replace

    known = MODELS[name]
    assert known.weight_bytes is not None
    return PlannedModel(name, known.repo, replace(known.shape, **shape), known.weight_bytes)


def plan(name: str, gpu: str, context: int, sessions: int, **others: Any) -> Plan:
    hardware = {
        key: others.pop(key)
        for key in ("num_gpus", "host_bytes", "disk_bytes", "device_kv_bytes", "tensor_parallel")
        if key in others
    }
    active = others.pop("num_active", sessions)
    return make_plan(
        planned(name),
        raw_hardware(find_gpu(gpu), **hardware),
        Demand(context, sessions, active, **others),
    )


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("smollm2-135m", 23_040),
        ("llama-2-13b", 819_200),
        ("gpt-oss-120b", 73_728),
    ],
)
def test_kv_of_known_models(name: str, bytes_per_token: int) -> None:
    shape = MODELS[name].shape
    assert PRESETS[name] is shape
    assert shape.bytes_per_token == bytes_per_token
    assert planned(name, bits=8).shape.bytes_per_token * 2 == bytes_per_token


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("mixtral-8x7b", 46_702_792_704),
        ("phi-4", 14_659_507_200),
    ],
)
def test_parameters_are_those_that_are_published(name: str, num_params: int) -> None:
    assert MODELS[name].shape.num_params == num_params


@pytest.mark.parametrize(
    ("name", "num_full", "num_windows", "window"),
    [
        ("mistral-7b-v0.1", 0, 32, 4096),
        ("gemma-2-9b", 21, 21, 4096),
        ("gemma-3-27b", 10, 52, 1024),
        ("gpt-oss-20b", 12, 12, 128),
    ],
)
def test_layers_with_a_window_stop_growing(
    name: str, num_full: int, num_windows: int, window: int
) -> None:
    shape = MODELS[name].shape
    layer_bytes = 2 * shape.num_kv_heads * shape.head_dim * 2
    tokens = 8 * window
    assert shape.num_window_layers == num_windows
    assert shape.kv_bytes(window) == (num_full + num_windows) * layer_bytes * window
    assert shape.kv_bytes(tokens) == layer_bytes * (num_full * tokens + num_windows * window)
    assert shape.kv_bytes(tokens, batch=3) == 3 * shape.kv_bytes(tokens)


@pytest.mark.parametrize("change", [{"num_window_layers": 1}, {"window_tokens": 0}])
def test_windows_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"^{name} is .*expected"):
        ModelShape(2, 2, 2, **change)


def test_every_row_has_a_source() -> None:
    assert len(MODELS) > 30
    assert len(GPUS) > 15
    for row in (*MODELS.values(), *GPUS.values()):
        assert "https://" in row.source
    for gpu in GPUS.values():
        assert len(gpu.link.source) > 20
        assert gpu.link.cold_bytes_per_second <= gpu.link.bytes_per_second


def test_names_are_found_in_any_writing() -> None:
    assert find_gpu("NVIDIA A100 80GB") is find_gpu("a100") is GPUS["a100-80gb"]
    assert find_model("meta-llama/llama-3.1-8B-instruct") is LLAMA_8B
    with pytest.raises(ConfigError, match="did you mean h200"):
        find_gpu("h2000")


@pytest.mark.parametrize(("tokens", "measured"), [(2048, 0.046), (8192, 0.204), (32_768, 1.184)])
def test_prefill_as_it_was_measured_on_an_h200(tokens: int, measured: float) -> None:
    prefill = rates_from_table(H200, 1, LLAMA_8B.shape).prefill
    assert prefill is not None
    assert prefill.seconds(tokens) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("batch", "measured"), [(1, 5.05e-3), (16, 6.0e-3), (64, 9.0e-3)])
def test_a_step_as_it_was_measured_on_an_h200(batch: int, measured: float) -> None:
    cost = plan("llama-3.1-8b", "h200", 2048, batch).cost
    assert cost.cold_bytes == 0
    assert cost.step_seconds == pytest.approx(measured, rel=0.2)


def test_cold_reads_as_they_were_measured_on_an_h200() -> None:
    """4 GiB of KV, half of it cold: attention took 41.5 ms."""
    made = plan("llama-3.1-8b", "h200", 32_768, 1, device_kv_bytes=2 * GiB)
    assert made.cost.cold_bytes == 2 * GiB
    assert made.cost.cold_seconds == pytest.approx(41.5e-3, rel=0.05)


def test_what_fits_is_plain_arithmetic() -> None:
    model, hardware = planned("llama-3.1-8b"), raw_hardware(H200, host_bytes=100 * GiB)
    found = fit(model.shape, model.weight_bytes, hardware, Demand(8192, 300, 300))
    assert found.pool_bytes == int(141e9 * 0.9) - GiB - model.weight_bytes
    assert found.session_bytes == GiB
    assert found.sessions_on_device == found.pool_bytes // GiB
    assert found.sessions_with_host == (found.pool_bytes + 100 * GiB) // GiB
    assert found.least_host_bytes == 300 * GiB - found.pool_bytes
    assert found.recommended_host_bytes == 330 * GiB


def test_a_shared_beginning_is_kept_once() -> None:
    model = planned("llama-3.1-8b")
    hardware = raw_hardware(H200, device_kv_bytes=10 * GiB, host_bytes=1)
    alone = fit(model.shape, 1, hardware, Demand(8192, 20, 20))
    shared = fit(model.shape, 1, hardware, Demand(8192, 20, 20, shared_tokens=4096))
    assert alone.sessions_on_device == 10
    assert shared.sessions_on_device == 19  # half a GiB for all, half a GiB each


def test_kv_and_weights_are_split_over_gpus() -> None:
    one = plan("llama-3.1-8b", "h200", 8192, 1)
    eight = plan("llama-3.1-8b", "h200", 8192, 1, num_gpus=8)
    assert eight.fit.session_bytes == one.fit.session_bytes
    assert eight.fit.pool_bytes + eight.fit.weight_bytes == pytest.approx(
        8 * (one.fit.pool_bytes + one.fit.weight_bytes)
    )
    assert eight.load_seconds[Tier.HOST] < one.load_seconds[Tier.HOST] / 3
    assert eight.compute_seconds == pytest.approx((one.compute_seconds or 0) / 8)


def test_more_gpus_than_kv_heads_keep_copies() -> None:
    assert num_copies(MODELS["llama-3.1-8b"].shape, 8) == 1
    assert num_copies(MODELS["llama-3.1-8b"].shape, 16) == 2
    assert num_copies(MODELS["qwen2.5-7b"].shape, 4) == 1
    assert num_copies(MODELS["deepseek-v3"].shape, 8) == 8  # a latent has no heads to split
    with pytest.raises(ConfigError, match="28 attention heads cannot be split over 8"):
        num_copies(MODELS["qwen2.5-7b"].shape, 8)
    with pytest.raises(ConfigError, match="10 KV heads cannot be split over 4"):
        num_copies(MODELS["phi-4"].shape, 4)


@pytest.mark.parametrize("gpu", ["a100-80gb", "a100-40gb"])
def test_the_story_of_eight_a100(gpu: str) -> None:
    """Sessions of 28,000 tokens that share 3,800; 2.4 times as many as the GPUs hold."""
    alone = plan("llama-3.1-70b", gpu, 28_000, 1, num_gpus=8, shared_tokens=3800)
    on_device = alone.fit.sessions_on_device
    sessions = int(on_device * 2.4)
    made = plan("llama-3.1-70b", gpu, 28_000, sessions, num_gpus=8, shared_tokens=3800)
    assert made.fit.session_bytes == 28_000 * 327_680
    # Reading from DRAM at every token is a fortieth as fast, and nothing does it over eight GPUs.
    assert made.verdict.kind is PlanKind.TURNS
    assert made.ways[0].num_running == on_device
    assert f"{on_device} of {sessions} active sessions decode at once" in made.verdict.reasons[0]
    # What 2.4 times the sessions need beyond the pool is 1.4 pools, about.
    assert made.fit.least_host_bytes == pytest.approx(1.4 * made.fit.pool_bytes, rel=0.1)
    assert made.fit.recommended_host_bytes == pytest.approx(
        2.4 * 1.1 * made.fit.pool_bytes, rel=0.1
    )
    assert made.fit.sessions_with_host >= sessions
    assert made.settings.serve is None  # 70B are more than one of these GPUs holds
    assert made.settings.vllm is not None
    assert made.settings.vllm[made.settings.vllm.index("--max-num-seqs") + 1] == str(on_device)


def test_sessions_larger_than_each_of_eight_gpus() -> None:
    """2 GiB for KV on each, 3.1 for a session: only `serve` runs it, a server on each GPU."""
    large = plan(
        *("llama-2-13b", "a100-40gb", 4096, 48),
        num_gpus=8,
        tensor_parallel=1,
        device_kv_bytes=8 * 2 * GiB,
    )
    assert large.verdict.kind is PlanKind.TAIL_PIN
    serve = large.settings.serve
    assert serve is not None
    assert large.settings.vllm is None
    assert "one server on each of 8 GPUs" in large.settings.serve_note
    given = dict(zip(serve[1::2], serve[2::2], strict=True))
    assert given["--resident-tail-tokens"] == "512"
    assert given["--device-kv-gib"] == "2"
    assert int(given["--session-device-tokens"]) < 4096


def test_short_prompts_are_computed() -> None:
    verdict = plan("llama-3.1-8b", "h200", 200, 5000).verdict
    assert verdict.kind is PlanKind.DO_NOT_OFFLOAD
    assert "Prompts are short" in verdict.reasons[1]


def test_little_reuse_is_no_reason_to_keep() -> None:
    made = plan("llama-3.1-8b", "h200", 4096, 20, reuse_share=0.02)
    assert made.verdict.kind is PlanKind.DO_NOT_OFFLOAD
    assert "Little reuse" in made.verdict.reasons[1]
    assert made.settings.serve == (LLAMA_8B.repo, "--kv-offloading-size", "0")
    assert made.settings.vllm_settings is None


def test_what_fits_needs_no_tiers_unless_it_is_read_again() -> None:
    assert plan("llama-3.1-8b", "h200", 4096, 20).verdict.kind is PlanKind.DEVICE_IS_ENOUGH
    again = plan("llama-3.1-8b", "h200", 4096, 20, reuse_share=0.4)
    assert again.verdict.kind is PlanKind.FOR_REUSE
    small = plan("llama-3.1-8b", "h200", 4096, 20, reuse_share=0.4, live_bytes=GiB)
    assert small.verdict.kind is PlanKind.DEVICE_IS_ENOUGH
    large = plan("llama-3.1-8b", "h200", 4096, 20, reuse_share=0.4, live_bytes=500 * GiB)
    assert large.verdict.kind is PlanKind.FOR_REUSE
    assert large.fit.recommended_host_bytes == 550 * GiB


def test_latency_critical_chat_is_never_cold() -> None:
    made = plan("llama-3.1-8b", "h200", 16_384, 100, max_token_seconds=0.05)
    assert made.verdict.kind is PlanKind.TURNS
    assert made.ways[0].token_seconds <= 0.05
    assert made.settings.serve is not None
    assert "--no-cold-kv" in made.settings.serve
    assert made.ways[0].cold_bytes == 0
    # With all patience, reading from DRAM at every token still gives fewer tokens.
    patient = plan("llama-3.1-8b", "h200", 16_384, 100, max_token_seconds=60.0)
    assert patient.verdict.kind is PlanKind.TURNS
    turns, cold = patient.ways
    assert turns.tokens_per_second > 5 * cold.tokens_per_second


def test_sessions_that_wait_for_their_users_need_not_be_cold() -> None:
    made = plan("llama-3.1-8b", "h200", 16_384, 500, num_active=10)
    assert made.verdict.kind is PlanKind.NEVER_COLD
    assert made.cost.cold_bytes == 0


def test_sessions_within_the_target_are_within_it() -> None:
    model = planned("llama-3.1-8b")
    hardware = raw_hardware(H200, host_bytes=400 * GiB)
    rates = rates_from_table(H200, 1, model.shape)
    for target in (0.007, 0.03, 0.05, 0.2):
        asked = Demand(16_384, 200, 200, max_token_seconds=target)
        found = fit(model.shape, model.weight_bytes, hardware, asked)
        most = decode_cost(model.shape, found, asked, rates).sessions_within_target
        assert most is not None
        assert most > 0

        def step(num: int) -> float:
            demand = Demand(16_384, num, num)
            found = fit(model.shape, model.weight_bytes, hardware, demand)
            return decode_cost(model.shape, found, demand, rates).step_seconds

        assert step(most) <= target * 1.001 < step(most + 1) * 1.002


def test_a_session_larger_than_the_gpu_is_for_serve_alone() -> None:
    made = plan("llama-3.1-8b", "l4", 131_072, 1, host_bytes=64 * GiB)
    assert made.fit.sessions_on_device == 0
    assert made.verdict.kind is PlanKind.TAIL_PIN
    assert made.settings.serve is not None
    assert made.settings.vllm is None
    assert "not one session fits" in made.settings.vllm_note


def test_too_little_dram_is_told_with_what_is_needed() -> None:
    warnings = plan("llama-3.1-8b", "h200", 16_384, 500, host_bytes=8 * GiB).verdict.warnings
    assert "With 8.0 GiB of DRAM, only 55 of 500 sessions fit" in warnings[0]
    assert "1.1 TiB is recommended" in warnings[0]


def test_a_disk_slower_than_computing_is_told() -> None:
    made = plan("llama-3.1-8b", "h200", 16_384, 500, disk_bytes=GiB << 10)
    assert (made.break_evens[Tier.DISK] or 0) > 16_384
    assert any("it helps after a restart" in warning for warning in made.verdict.warnings)


@pytest.mark.parametrize(
    ("name", "words", "note"),
    [
        ("deepseek-v3", "keeps more of MLA", "5.7 MiB per token"),
        ("gemma-3-27b", "keeps more of sliding window layers", "496.0 KiB per token"),
        ("qwen3-next-80b-a3b", "does not support gated delta net state layers", "refuses"),
    ],
)
def test_plans_count_models_with_several_kinds_of_layers_in_vllm_only(
    name: str, words: str, note: str
) -> None:
    made = plan(name, "h200", 131_072, 2000, num_gpus=8, host_bytes=1024 * GiB)
    assert made.verdict.kind.runs
    assert made.settings.vllm is not None
    assert made.settings.serve is None
    assert note in made.settings.serve_note
    cold = [way for way in made.ways if way.mode is Mode.COLD]
    assert cold
    assert all(words in way.obstacle for way in cold)


def test_windows_and_states_on_the_gpu_and_in_dram() -> None:
    shape = PRESETS["gemma-3-27b"]
    window = 52 * 2 * 16 * 128 * 2 * 1024
    demand = Demand(32_768, 40, 10, shared_tokens=4096, num_turns=5)
    found = fit(shape, 0, raw_hardware(H200, host_bytes=64 * GiB), demand)
    assert found.session_bytes == 81_920 * 32_768 + window
    assert found.shared_bytes == 81_920 * 4096
    assert found.checkpoint_bytes == window
    assert found.offloaded_bytes == 81_920 * 32_768 + 5 * window
    assert found.offloaded_own_bytes == 81_920 * (32_768 - 4096) + 5 * window
    wanted = 40 * found.offloaded_own_bytes + found.shared_bytes + window  # and a checkpoint of it
    assert found.recommended_host_bytes == math.ceil(wanted * 1.1 / GiB) * GiB
    on_device = (found.pool_bytes - found.shared_bytes) / found.own_bytes
    in_dram = 64 * GiB / found.offloaded_own_bytes
    assert found.sessions_with_host == int(on_device + in_dram)
    # A plain model has one size everywhere.
    plain = fit(PRESETS["llama-3.1-8b"], 0, raw_hardware(H200), demand)
    assert plain.offloaded_bytes == plain.session_bytes
    assert plain.checkpoint_bytes == 0


def test_latents_are_kept_once_in_dram() -> None:
    found = fit(PRESETS["deepseek-v3"], 0, raw_hardware(H200, 8), Demand(32_768, 8, 8))
    assert found.session_bytes == 8 * 70_272 * 32_768
    assert found.offloaded_bytes == 70_272 * 32_768


def test_states_make_short_loads_slower_than_computing() -> None:
    """A load of a few tokens brings 37.7 MiB of states."""
    made = plan("qwen3-next-80b-a3b", "h200", 32_768, 10, num_gpus=2)
    link, prefill = made.rates.links[Tier.HOST].rate, made.rates.prefill
    assert prefill is not None
    shape, least = made.model.shape, made.break_evens[Tier.HOST]
    assert least is not None

    def loads_in(tokens: int) -> float:
        return link.seconds(shape.kv_bytes(tokens, num_gpus=made.layout.gpus_each))

    assert loads_in(least) <= prefill.seconds(least)
    assert loads_in(least - 1) > prefill.seconds(least - 1)


def test_copies_of_a_model_have_weights_pools_and_links_of_their_own() -> None:
    one = plan("llama-3.1-8b", "h200", 8192, 25, tensor_parallel=1)
    two = plan("llama-3.1-8b", "h200", 8192, 50, num_gpus=2, tensor_parallel=1)
    assert two.layout == Layout(num_servers=2, gpus_each=1)
    for name in ("weight_bytes", "pool_bytes", "sessions_on_device", "recommended_host_bytes"):
        assert getattr(two.fit, name) == 2 * getattr(one.fit, name)
    assert two.load_seconds == one.load_seconds  # a session comes over one GPU's link
    assert two.compute_seconds == one.compute_seconds
    assert two.ways[0].token_seconds == one.ways[0].token_seconds
    assert two.ways[0].tokens_per_second == pytest.approx(2 * one.ways[0].tokens_per_second)
    split = plan("llama-3.1-8b", "h200", 8192, 50, num_gpus=2, tensor_parallel=2)
    assert split.fit.weight_bytes == one.fit.weight_bytes
    assert split.compute_seconds == pytest.approx((one.compute_seconds or 0) / 2)


def test_copies_are_what_is_pasted() -> None:
    made = plan("llama-3.1-8b", "h100", 16_384, 400, num_gpus=8, tensor_parallel=4, num_active=80)
    vllm, settings = made.settings.vllm, made.settings.vllm_settings
    assert vllm is not None
    assert settings is not None
    given = dict(zip(vllm[1::2], vllm[2::2], strict=True))
    assert (given["--tensor-parallel-size"], given["--data-parallel-size"]) == ("4", "2")
    # Of each copy, as vLLM takes it.
    assert settings.kv_offloading_size * GiB * 2 == made.fit.recommended_host_bytes
    assert int(given["--max-num-seqs"]) * 2 <= made.fit.sessions_on_device


def test_a_context_beyond_the_model_is_said() -> None:
    made = plan("qwen2.5-7b", "h200", 32_769, 10)
    assert made.verdict.kind is PlanKind.CONTEXT_TOO_LONG
    assert "32,769 tokens are more than the 32,768" in made.verdict.reasons[0]
    assert made.settings.serve is made.settings.vllm is None
    assert plan("qwen2.5-7b", "h200", 32_768, 10).verdict.kind.runs


def test_mixtures_prefill_by_what_is_active_at_a_share_that_is_said() -> None:
    shape = MODELS["qwen3-30b-a3b"].shape
    rates = rates_from_table(H200, 1, shape)
    assert rates.prefill is not None
    assert shape.num_active_params is not None
    expected = H200.operations_per_second * 0.35 / (2 * shape.num_active_params)
    assert rates.prefill.tokens_per_second == pytest.approx(expected)
    assert "35% of the" in rates.prefill_source
    assert "in the data sheet" in rates.prefill_source
    assert "3.4 billion active parameters" in rates.prefill_source
    assert "assumed" in rates.prefill_source


def test_a_large_batch_is_bound_by_computing() -> None:
    made = plan("smollm2-135m", "h200", 64, 20_000)
    assert made.rates.prefill is not None
    assert made.ways[0].tokens_per_second <= made.rates.prefill.tokens_per_second * 1.001


def test_what_cannot_run_never_comes_first() -> None:
    made = plan("llama-3.1-70b", "h100", 32_768, 64, num_gpus=4)
    best, *others = made.ways
    assert (best.mode, best.can_run, best.num_running) == (Mode.TURNS, True, 13)
    assert best.tokens_per_second > 300
    obstacles = [way.obstacle for way in others if not way.can_run]
    assert obstacles
    assert all("one GPU" in obstacle for obstacle in obstacles)
    assert made.verdict.kind is PlanKind.TURNS


def test_a_session_for_which_there_is_no_room_at_all() -> None:
    made = plan("llama-3.1-8b", "l4", 131_072, 1, host_bytes=2 * GiB)
    assert made.verdict.kind is PlanKind.DOES_NOT_FIT
    assert "One session of 16.0 GiB does not fit" in made.verdict.reasons[0]
    assert "Use 2 GPUs" in made.verdict.reasons[0]


def test_weights_that_do_not_fit() -> None:
    made = plan("llama-3.1-70b", "h100", 4096, 1)
    assert made.verdict.kind is PlanKind.DOES_NOT_FIT
    assert "Use 4 GPUs" in made.verdict.reasons[0]


def test_fp8_is_passed_on_to_both_engines() -> None:
    model = planned("llama-3.1-8b", bits=8)
    made = make_plan(model, raw_hardware(H200), Demand(32_768, 100, 100))
    assert made.fit.session_bytes == 2 * GiB
    for options in (made.settings.serve, made.settings.vllm):
        assert options is not None
        assert options[options.index("--kv-cache-dtype") + 1] == "fp8"


def test_other_widths_are_not_served() -> None:
    model = planned("llama-3.1-8b", bits=32)
    made = make_plan(model, Hardware(H200), Demand(32_768, 4, 4))
    assert made.settings.serve is None
    assert "32-bit KV" in made.settings.serve_note


PROBE: dict[str, Any] = {
    "kv_bytes_per_token": 131_072,
    "prefill": {"tokens_per_second": 9000.0, "source": "given"},
    "links": [
        {"name": "memory copy", "bytes_per_second": 1e10, "latency_seconds": 0.0, "loads": True},
        {"name": "disk read, 4 threads", "bytes_per_second": 7e9, "latency_seconds": 1e-3}
        | {"loads": True},
        {"name": "disk write, 4 threads", "bytes_per_second": 9e9, "latency_seconds": 0.0}
        | {"loads": False},
        {"name": "remote get, 2.0 MiB", "bytes_per_second": 2e9, "latency_seconds": 2e-3}
        | {"loads": True},
    ],
}


def test_a_probe_takes_the_place_of_the_table() -> None:
    table = rates_from_table(H200, 1, LLAMA_8B.shape)
    rates = with_probe(table, PROBE, 131_072)
    assert rates.links[Tier.HOST] == table.links[Tier.HOST]  # its copies do not cross PCIe
    assert rates.links[Tier.DISK].rate.bytes_per_second == 7e9
    assert rates.links[Tier.REMOTE].rate.latency_seconds == 2e-3
    assert rates.prefill is not None
    assert rates.prefill.tokens_per_second == 9000
    other = with_probe(table, PROBE, 23_040)  # somebody else's model
    assert other.prefill == table.prefill
    made = make_plan(
        planned("llama-3.1-8b"), raw_hardware(H200), Demand(8192, 1, 1), lambda _gpus: rates
    )
    assert made.break_evens[Tier.REMOTE] is not None
    assert made.load_seconds[Tier.DISK] == pytest.approx(5e-3 + GiB / 7e9)


@pytest.mark.parametrize("probe", [{}, [], None, {**PROBE, "links": [{"name": 1}]}, 7])
def test_a_probe_with_other_fields_is_refused(probe: object) -> None:
    with pytest.raises(ConfigError, match="penstock probe --json"):
        with_probe(rates_from_table(H200, 1, LLAMA_8B.shape), probe, 1)


def test_a_model_of_unknown_size_has_no_break_even() -> None:
    shape = ModelShape(32, 8, 128)
    made = make_plan(PlannedModel("m", "m", shape, GiB), raw_hardware(H200), Demand(8192, 500, 500))
    assert made.break_evens == {}
    assert made.compute_seconds is None
    assert made.verdict.kind is PlanKind.TURNS
    given = with_prefill(made.rates, 1000.0)
    again = make_plan(made.model, made.hardware, made.demand, lambda _gpus: given)
    assert again.compute_seconds == pytest.approx(8.192)


@pytest.mark.parametrize(
    "change",
    [
        {"context_tokens": 0},
        {"num_sessions": 0},
        {"num_active": 0},
        {"num_active": 3},
        {"shared_tokens": -1},
        {"shared_tokens": 100},
    ],
)
def test_impossible_demands_are_refused(change: dict[str, int]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"^{name} is .*expected"):
        Demand(**{"context_tokens": 100, "num_sessions": 2, "num_active": 2, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"num_gpus": 0},
        {"tensor_parallel": 2},
        {"memory_utilization": 0.0},
        {"host_bytes": -1},
        {"disk_bytes": -1},
    ],
)
def test_impossible_hardware_is_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"^{name} is .*expected"):
        make_plan(planned("llama-3.1-8b"), raw_hardware(H200, **change), Demand(1, 1, 1))


def test_dram_and_disk_hold_packed_kv() -> None:
    model, demand = planned("llama-3.1-8b"), Demand(32_768, 200, 16)
    sizes: dict[str, Any] = {"host_bytes": 256 * GiB, "disk_bytes": 1024 * GiB}
    raw = make_plan(model, Hardware(H200, **sizes, host_codec="raw"), demand)
    packed = make_plan(model, Hardware(H200, **sizes), demand)
    ratio = packed.packings[Tier.HOST].ratio
    assert [packed.packings[tier].codec for tier in packed.packings] == ["lossless"] * 3
    assert [raw.packings[tier].codec for tier in raw.packings] == ["raw"] * 3
    assert 0.76 < ratio < 0.78
    assert packed.fit.session_bytes == raw.fit.session_bytes == 4 * GiB  # on the GPU nothing is
    assert packed.fit.offloaded_bytes == math.ceil(4 * GiB * ratio)
    assert raw.fit.host_blocks == 256 * 512
    assert packed.fit.host_blocks >= 1.28 * raw.fit.host_blocks
    assert packed.fit.disk_tokens == 16 * packed.fit.disk_blocks >= 1.28 * raw.fit.disk_tokens
    assert packed.fit.sessions_with_host > raw.fit.sessions_with_host
    assert packed.fit.sessions_with_disk > 1.2 * raw.fit.sessions_with_disk
    needed = packed.fit.recommended_host_bytes / raw.fit.recommended_host_bytes
    assert needed == pytest.approx(ratio, rel=0.01)


def test_packed_kv_crosses_links_faster() -> None:
    model, demand = planned("llama-3.1-8b"), Demand(32_768, 200, 16)
    raw = make_plan(model, raw_hardware(H200), demand)
    packed = make_plan(model, Hardware(H200), demand)
    ratio = packed.packings[Tier.HOST].ratio
    for tier in (Tier.HOST, Tier.DISK):
        rates = [made.rates.links[tier].rate.bytes_per_second for made in (raw, packed)]
        assert rates[1] == pytest.approx(rates[0] / ratio)
        assert packed.load_seconds[tier] < raw.load_seconds[tier]
        assert "lossless" in packed.rates.links[tier].source
    assert packed.cost.cold_seconds == pytest.approx(raw.cost.cold_seconds * ratio)


def test_a_codec_for_the_disk_alone() -> None:
    hardware = Hardware(H200, disk_bytes=100 * GiB, host_codec="raw", disk_codec="int4")
    made = make_plan(planned("llama-3.1-8b"), hardware, Demand(32_768, 200, 16))
    codecs = [made.packings[tier].codec for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)]
    assert codecs == ["raw", "int4", "raw"]
    assert made.fit.disk_blocks > 2 * (100 * GiB // (2 * 1024 * 1024))
    # A load passes both links: the one to the GPU carries raw KV.
    assert made.load_seconds[Tier.DISK] > made.load_seconds[Tier.HOST]


@pytest.mark.parametrize(
    ("name", "bits", "words"),
    [
        ("llama-3.1-8b", 8, "this KV is float8_e4m3fn"),
        ("llama-3.1-8b", 32, "this KV is float32"),
        ("llama-2-7b", 16, "this KV is float16"),
        ("qwen3-next-80b-a3b", 16, "gated delta net state"),
    ],
)
def test_what_is_not_bfloat16_stays_raw(name: str, bits: int, words: str) -> None:
    model, demand = planned(name, bits=bits), Demand(4096, 64, 16)
    made = make_plan(model, Hardware(H200), demand)
    assert made.packings[Tier.HOST].codec == "raw"
    assert words in made.packings[Tier.HOST].why
    again = make_plan(model, raw_hardware(H200), demand)
    assert (again.fit, again.cost) == (made.fit, made.cost)
    with pytest.raises(ConfigError, match="--host-codec is lossless"):
        make_plan(model, Hardware(H200, host_codec="lossless"), demand)


def test_settings_name_a_codec_only_if_it_was_chosen() -> None:
    model, demand = planned("llama-3.1-8b"), Demand(32_768, 200, 16)
    sizes: dict[str, Any] = {"host_bytes": 256 * GiB, "disk_bytes": 1024 * GiB}
    made = make_plan(model, Hardware(H200, **sizes), demand).settings
    assert made.serve is not None
    assert made.vllm_settings is not None
    assert "--set" not in made.serve
    assert made.vllm_settings.set is None
    made = make_plan(model, Hardware(H200, **sizes, disk_codec="fp8"), demand).settings
    assert made.serve is not None
    assert made.vllm_settings is not None
    assert "disk.codec=fp8" in made.serve
    assert made.vllm_settings.set == {"disk.codec": "fp8"}
