"""What vLLM writes to blocks before it calls `handle_preemptions`, which holds it back for saves.

Its newer model runner (V2) zeroes new blocks and copies partly hit ones first. That would spoil a
save under way. With one group of plain attention it does neither. Where it does, saves end within
their own step (`Ways.writes_reused_blocks_early`).
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from penstock.connectors.vllm.orders import Shard
from penstock.connectors.vllm.scheduler import Ways


@pytest.fixture
def spec() -> object:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)


def test_the_newer_runner_writes_to_blocks_before_it_can_be_held_back() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    text = inspect.getsource(GPUModelRunner.execute_model)
    assert "kv_connector.pre_forward" in text  # which calls `handle_preemptions`
    assert text.index("self.update_requests(") < text.index("kv_connector.pre_forward")
    assert text.index("self.update_requests(") < text.index("kv_connector.no_forward")
    writes = inspect.getsource(GPUModelRunner.update_requests)
    assert "zero_block_ids" in writes
    assert "copy_kv_cache_blocks_inplace" in writes


def ways(*specs: object, is_newer: bool = True) -> Ways:
    """How the connector takes a vLLM with these groups to work."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from penstock.connectors.vllm.connector import PenstockConnector
    from penstock.connectors.vllm.groups import read_groups

    groups = [KVCacheGroupSpec([f"layer {place}"], one) for place, one in enumerate(specs)]
    connector = PenstockConnector.__new__(PenstockConnector)
    connector._kv_cache_config = KVCacheConfig(8, [], groups)
    connector._vllm_config = SimpleNamespace(
        use_v2_model_runner=is_newer,
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1),
    )
    connector._groups = read_groups(connector._kv_cache_config, connector._vllm_config)
    connector._is_latent = False
    connector._fails_whole = not connector._groups.is_plain
    return connector._ways([Shard(0, 1, 8, "", 1, device="cuda")])


def test_with_one_group_of_plain_attention_it_writes_nothing_there(spec: object) -> None:
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    assert not KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)]).needs_kv_cache_zeroing
    assert not UnitaryKVCacheCoordinator.enable_partial_hash_hits
    assert not ways(spec).writes_reused_blocks_early


def test_where_it_zeroes_saves_end_first(spec: object) -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    state = MambaSpec(
        block_size=16, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    groups = [KVCacheGroupSpec(["layer"], spec), KVCacheGroupSpec(["state"], state)]
    assert KVCacheConfig(8, [], groups).needs_kv_cache_zeroing
    assert ways(spec, state).writes_reused_blocks_early
    assert not ways(spec, state, is_newer=False).writes_reused_blocks_early
