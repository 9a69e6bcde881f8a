"""vLLM's metrics in our words."""

from __future__ import annotations

import pytest
from watch.prepared import vllm_text

from penstock.watch.quantiles import quantile
from penstock.watch.samples import Samples, read_samples
from penstock.watch.vllm_names import is_vllm, model_names, to_our_names


def read(text: str) -> Samples:
    return read_samples(text, ("penstock_", "vllm:"))


@pytest.fixture
def seen() -> Samples:
    return to_our_names(read(vllm_text()))


def test_ours_stay_as_they_are(seen: Samples) -> None:
    assert seen.total("penstock_hit_blocks_total", tier="host") == 60
    own = 'penstock_lookups_total 7\npenstock_sequences{phase="running"} 2\n'
    assert to_our_names(read(own)).values == read(own).values


def test_nothing_of_theirs_is_left(seen: Samples) -> None:
    assert all(name.startswith("penstock_") for name, _ in seen.values)


def test_who_runs_and_who_waits(seen: Samples) -> None:
    assert seen.by("penstock_sequences", "phase") == {"running": 3, "waiting": 4}
    assert seen.total("penstock_preemptions_total") == 2


def test_who_loads_is_not_said_to_wait() -> None:
    stages = {"waiting_to_start": 1, "in_progress": 3, "completed_waiting": 1}
    text = 'vllm:num_requests_waiting{engine="0"} 7\n' + "".join(
        f'vllm:num_requests_kv_fetch_by_stage{{engine="0",stage="{stage}"}} {num}\n'
        for stage, num in stages.items()
    )
    seen = to_our_names(read(text))
    assert seen.by("penstock_sequences", "phase") == {"loading": 3, "waiting": 4}


def test_where_prompts_came_from(seen: Samples) -> None:
    assert seen.by("penstock_prompt_tokens_total", "source") == {
        "computed": 300,
        "device": 200,
        "loaded": 500,
    }


def test_a_source_that_is_new_keeps_its_name() -> None:
    text = 'vllm:prompt_tokens_by_source_total{source="the_moon"} 5\n'
    found = to_our_names(read(text)).by("penstock_prompt_tokens_total", "source")
    assert found == {"the_moon": 5}


def test_what_was_computed(seen: Samples) -> None:
    assert seen.total("penstock_output_tokens_total") == 80
    assert seen.total("penstock_step_tokens_total") == 300 + 80


def test_first_tokens_are_not_told_apart(seen: Samples) -> None:
    name = "penstock_first_token_seconds"
    assert seen.by(f"{name}_count", "prompt") == {"all": 10}
    assert quantile(seen, name, 0.5, prompt="all") == pytest.approx(0.1)
    assert quantile(seen, "penstock_token_seconds", 0.5) == pytest.approx(0.025)


def test_its_pool_is_the_device(seen: Samples) -> None:
    assert seen.total("penstock_used_blocks", tier="device") == pytest.approx(100)
    assert seen.total("penstock_capacity_blocks", tier="device") == 400


def test_pools_of_several_engines_are_told_by_engine() -> None:
    lines = []
    for engine, blocks, share in (("0", 100, 0.5), ("1", 300, 1.0)):
        lines.append(f'vllm:kv_cache_usage_perc{{engine="{engine}"}} {share}')
        lines.append(f'vllm:cache_config_info{{engine="{engine}",num_gpu_blocks="{blocks}"}} 1.0')
    seen = to_our_names(read("\n".join(lines)))
    assert seen.total("penstock_used_blocks", tier="device") == 350
    assert seen.total("penstock_capacity_blocks", tier="device") == 400


@pytest.mark.parametrize(
    "info", ["", 'vllm:cache_config_info{engine="0",num_gpu_blocks="None"} 1.0\n']
)
def test_a_pool_of_unknown_size_is_a_share(info: str) -> None:
    seen = to_our_names(read(f'vllm:kv_cache_usage_perc{{engine="0"}} 0.25\n{info}'))
    assert seen.total("penstock_used_blocks", tier="device") == 0.25
    assert seen.total("penstock_capacity_blocks", tier="device") == 1


def test_who_it_is() -> None:
    assert is_vllm(read(vllm_text()))
    assert model_names(read(vllm_text())) == ["smol"]
    ours = read("penstock_lookups_total 7\n")
    assert not is_vllm(ours)
    assert model_names(ours) == []


def test_a_model_of_several_names_once_each() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{engine}",model_name="{name}"}} 1\n'
        for engine, name in (("0", "b"), ("1", "b"), ("2", "a"))
    )
    assert model_names(read(text)) == ["a", "b"]
