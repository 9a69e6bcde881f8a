"""What vLLM writes to blocks before it calls `handle_preemptions`, which holds it back for saves.

Its newer model runner (V2) zeroes new blocks and copies partly hit ones first. That would spoil a
save under way, if either happened with one group of plain attention. It is the reason why
`check_groups` refuses caches that are zeroed; whoever lets in more than one group must first see
to it that saves have ended by then.
"""

from __future__ import annotations

import inspect

import pytest
import torch


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


def test_with_one_group_of_plain_attention_it_writes_nothing_there(spec: object) -> None:
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from penstock.connectors.vllm.support import check_groups

    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    assert check_groups(config) is spec
    assert not config.needs_kv_cache_zeroing
    assert not UnitaryKVCacheCoordinator.enable_partial_hash_hits


def test_what_it_zeroes_is_refused(spec: object) -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from penstock.connectors.vllm.support import check_groups
    from penstock.errors import ConfigError

    state = MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,))
    groups = [KVCacheGroupSpec(["layer"], spec), KVCacheGroupSpec(["state"], state)]
    config = KVCacheConfig(8, [], groups)
    assert config.needs_kv_cache_zeroing
    with pytest.raises(ConfigError):
        check_groups(config)
