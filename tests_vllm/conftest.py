"""Real vLLM on a CPU, with and without Penstock. Of a file, one engine at a time computes."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)

BLOCK = 32  # tokens; the smallest that vLLM takes on a CPU
MODEL = os.environ.get("TEST_MODEL", "")

pytest.register_assert_rewrite("group_checks")

_UNSEEN = "llvmlite.binding.ffi"

Tokens = list[int]

# Files run two at a time: the longest first, so that none of them is left alone at the end.
_LONGEST = (
    "test_soak.py",
    "test_identity.py",
    "test_injected_errors.py",
    "test_serve.py",
    "test_group_parallel.py",
    "test_group_states.py",
    "test_group_windows.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONGEST)


class Vllm:
    """An engine, and what the tests ask of it.

    Within this process it starts in seconds, once vLLM is imported; but it does nothing then unless
    it is told to step.
    """

    def __init__(self, *, in_process: bool = False, **given: Any) -> None:
        from vllm import LLM

        self._in_process = in_process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
        if in_process:
            given.setdefault("distributed_executor_backend", "uni")
        given = {
            "model": MODEL,
            "dtype": "float32",
            "max_model_len": 1024,
            "enforce_eager": True,
            "block_size": BLOCK,
        } | given
        if given["block_size"] is None:  # vLLM chooses
            del given["block_size"]
        # Once numba is imported, another engine on a CPU cannot start in the same process: vLLM
        # looks at whatever lies in any module, and cannot bear the look of this one.
        hidden = sys.modules.pop(_UNSEEN, None)
        try:
            self.llm = LLM(seed=0, disable_log_stats=False, **given)
        finally:
            if hidden is not None:
                sys.modules[_UNSEEN] = hidden

    def ask(
        self, prompts: list[Tokens], num: int = 8, *, salt: str = "", **params: Any
    ) -> list[Any]:
        from vllm import SamplingParams

        salted = {"cache_salt": salt} if salt else {}
        asked = [{"prompt_token_ids": prompt, **salted} for prompt in prompts]
        params = {"temperature": 0, "max_tokens": num, "ignore_eos": True} | params
        return list(self.llm.generate(asked, SamplingParams(**params), use_tqdm=False))

    def answers(self, prompts: list[Tokens], num: int = 8, **params: Any) -> list[Tokens]:
        return [list(output.outputs[0].token_ids) for output in self.ask(prompts, num, **params)]

    def answer(self, prompt: Tokens, num: int = 8) -> tuple[Tokens, dict[str, int]]:
        """The answer, and how many tokens came from where."""
        output = self.ask([prompt], num)[0]
        told = (output.kv_transfer_params or {}).get("penstock", {})
        return list(output.outputs[0].token_ids), told.get("loaded_tokens", {})

    def forget(self, *, below: bool = False) -> None:
        """Empty vLLM's own prefix cache, or also what lies below."""
        for _ in range(100):
            if self.llm.reset_prefix_cache(reset_connector=below):
                return
            self.run_for(0.1)
        raise AssertionError("vLLM's prefix cache could not be emptied")

    def run_for(self, seconds: float) -> None:
        """Let the engine work on what it was given, without waiting for an answer."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if self._in_process:
                self.llm.llm_engine.step()
            time.sleep(0.01)

    def check_nothing_is_held(self) -> None:
        """No block of the device belongs to anybody, and vLLM's own figure says so.

        vLLM refuses to empty its prefix cache while a block is held. Its figure is made at the end
        of steps alone: what an abort freed since is not in it, so another request is asked first.
        """
        self.forget()
        ends = time.monotonic() + 60
        while True:
            self.ask([[1, 2, 3]], 1, detokenize=False)
            share = self.metric("vllm:kv_cache_usage_perc")
            if share == 0:
                return
            assert time.monotonic() < ends, f"{share} of the blocks are held"

    def metric(self, name: str) -> float:
        return sum(found.value for found in self.llm.get_metrics() if found.name == name)

    def loaded_blocks(self) -> float:
        """Blocks that Penstock brought to the device, in all engines of this process."""
        from prometheus_client import REGISTRY

        return sum(
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == "penstock_blocks_total" and sample.labels["target"] == "device"
        )

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Faults:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._now: dict[str, Any] = {}
        os.environ["FAULTS"] = str(path)

    def set(self, **wrong: Any) -> None:
        kept = {name: self._now.get(name, 0) for name in ("empty_host", "drain", "round")}
        self._now = kept | wrong
        self._path.write_text(json.dumps(self._now))

    def new_round(self) -> int:
        """Both sides of the connector begin anew."""
        self.set(round=self._now.get("round", 0) + 1)
        return int(self._now["round"])

    @property
    def last_injected(self) -> int:
        """The round in which an error was last raised."""
        path = Path(f"{self._path}.injected")
        return int(path.read_text()) if path.exists() else 0

    def empty_host(self, *, drain: float = 20.0) -> None:
        """Let what follows come from disk: an engine at rest has all of it there by then."""
        self.set(empty_host=self._now.get("empty_host", 0) + 1, drain=drain)


def transfer(module: str = "faulty", policy: str = "recompute", **extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    from penstock.connectors.vllm.settings import VllmSettings, transfer_config

    made = transfer_config(VllmSettings(**extra))
    made["kv_connector_module_path"] = module
    made["kv_load_failure_policy"] = policy
    return KVTransferConfig(**made)


Start = Callable[..., Vllm]
Started = tuple[str, dict[str, Any], dict[str, str]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models lie, one folder for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "models"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def plain() -> Iterator[Vllm]:
    """vLLM without Penstock: what every answer is compared with."""
    vllm = Vllm()
    yield vllm
    vllm.close()


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    faults = Faults(tmp_path_factory.mktemp("faults") / "faults.json")
    yield faults
    os.environ.pop("FAULTS", None)


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts engines with Penstock, and closes them at the end."""
    engines: list[Vllm] = []

    def make(
        *, disk: Path | None = None, given: dict[str, Any] | None = None, **extra: Any
    ) -> Vllm:
        if disk is not None:
            extra |= {"disk_path": str(disk), "disk_size": 2.0}
        extra.setdefault("kv_offloading_size", 1.0)
        engine = Vllm(kv_transfer_config=transfer(**extra), **(given or {}))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def started(name: str) -> Started:
    """A tiny model's name, more options of LLM(), and variables of the environment."""
    return name, {}, {}


@pytest.fixture(scope="module")
def case(
    started: Started, models: Path, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A tiny model with Penstock and a disk, as group_checks.py tests it."""
    from group_checks import Case
    from group_models import MODELS

    name, more, environment = started
    faults.set()
    disk = tmp_path_factory.mktemp("disk") / "kv"
    case = Case(MODELS[name], models, disk, faults, more, environment)
    yield case
    case.close()


def half() -> str:
    """vLLM's build for ARM dies of bfloat16 on a processor that does not have it."""
    if platform.machine() == "aarch64" and "bf16" not in Path("/proc/cpuinfo").read_text():
        return "float16"
    return "bfloat16"


def tokens(num: int, seed: int) -> Tokens:
    """Token ids that mean nothing, the same ones for the same seed."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(1000, 30_000) for _ in range(num)]
