"""Several workers: each holds some heads of every layer, or some layers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Started
from group_checks import Checks

# Two workers on two cores, one each.
_TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
_TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
# vLLM cannot run stages eagerly on a CPU: they are compiled, by a compiler that does nothing.
_PIPELINE: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gemma3", _TENSOR, {}), id="gemma3-tensor"),
        pytest.param(("deepseek3", _TENSOR, {}), id="deepseek3-tensor"),
        pytest.param(
            ("llama5", _PIPELINE, {"VLLM_PP_LAYER_PARTITION": "3,2"}),
            id="llama-unequal-pipeline",
        ),
    ],
)
def started(request: pytest.FixtureRequest) -> Started:
    name, more, environment = request.param
    return name, more, _TWO_CORES | environment


class TestParallel(Checks):
    pass
