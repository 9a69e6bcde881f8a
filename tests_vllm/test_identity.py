"""Which KV is whose, in real vLLM: what differs never shares a block, what is the same does."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from conftest import BLOCK, Start, Vllm, tokens
from tiny import VOCABULARY, make_adapter, make_tiny, make_tiny_phi3

from penstock.connectors.vllm import identity
from penstock.connectors.vllm.configuration import (
    describe,
    harmless_fields,
    harmless_variables,
)
from penstock.connectors.vllm.identity import Naming, model_namespace
from penstock.connectors.vllm.orders import Shard
from penstock.connectors.vllm.support import NEWEST
from penstock.keys import Namespace
from servers import is_skipped
from servers.redis_server import WHY_NOT, RedisServer

FIELDS = json.loads(
    (Path(__file__).parent.parent / "tests" / "connectors" / "vllm_fields.json").read_text()
)
SHARDS = [Shard(0, 512, 100, "CPU_ATTN: 3 layers", 1)]


# The fields of vLLM's config objects.


def config_classes() -> dict[str, type]:
    import vllm.config

    found = {}
    for module in pkgutil.iter_modules(vllm.config.__path__, "vllm.config."):
        for kind in vars(importlib.import_module(module.name)).values():
            is_own = isinstance(kind, type) and kind.__module__ == module.name
            if is_own and dataclasses.is_dataclass(kind):
                found[kind.__name__] = kind
    return found


def is_newest() -> bool:
    import vllm

    return tuple(int(part) for part in vllm.__version__.split(".")[:2]) == NEWEST


def names_of(kind: str) -> set[str]:
    if kind == "environment":
        from vllm import envs

        return set(envs.environment_variables)
    made = config_classes().get(kind)
    return {field.name for field in dataclasses.fields(made)} if made else set()


@pytest.mark.parametrize("kind", FIELDS["counted"])
def test_somebody_has_read_what_every_field_does(kind: str) -> None:
    """If this fails: read it, and list the field in harmless.py or in vllm_fields.json."""
    harmless = harmless_variables() if kind == "environment" else harmless_fields(kind)
    assert names_of(kind) - harmless - set(FIELDS["counted"][kind]) == set()


@pytest.mark.skipif(not is_newest(), reason="an older vLLM lacks what the newest has")
@pytest.mark.parametrize("kind", FIELDS["counted"])
def test_nothing_is_listed_that_no_version_has(kind: str) -> None:
    harmless = harmless_variables() if kind == "environment" else harmless_fields(kind)
    listed = harmless | set(FIELDS["counted"][kind])
    assert listed - names_of(kind) - set(FIELDS["gone"].get(kind, ())) == set()


def test_every_config_class_is_walked_or_stands_aside() -> None:
    known = {*FIELDS["counted"], *FIELDS["aside"]}
    # A request's parameters, and ranges of a compiler.
    assert set(config_classes()) - known <= {"SpeechToTextParams", "Range", "BaseDummyOptions"}


# Pairs of configurations.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return make_tiny(folder / "llama")


@pytest.fixture(scope="module")
def phi3(folder: Path) -> Path:
    return make_tiny_phi3(folder / "phi3")


Namespaces = Callable[..., Namespace]


@pytest.fixture
def namespace(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Namespaces:
    from vllm.engine.arg_utils import EngineArgs

    # An engine begins after its model was written; this process made it.
    monkeypatch.setattr(identity, "process_start", lambda: time.time() + 60)

    def make(environment: dict[str, str] | None = None, **args: Any) -> Namespace:
        args = {
            "model": str(llama),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 256,
            "block_size": BLOCK,
            **args,
        }
        with monkeypatch.context() as patched:
            for name, value in (environment or {}).items():
                patched.setenv(name, value)
            return model_namespace(
                EngineArgs(**args).create_engine_config(), "0.32.0", SHARDS
            ).physical()

    return make


def label_aside(namespace: Namespace) -> Namespace:
    return dataclasses.replace(namespace, model="")


@pytest.mark.parametrize(
    "args",
    [
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 512},
        {"gpu_memory_utilization": 0.5},
        {"enable_prefix_caching": False},
        {"prefix_caching_hash_algo": "xxhash"},
        {"enforce_eager": True},
        {"max_model_len": 1024},
        {"seed": 7},
        {"served_model_name": "label"},
        {"max_logprobs": 5},
        {"disable_log_stats": True},
        {"enable_lora": True, "max_lora_rank": 32},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
        {"environment": {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PORT": "45000"}},
        {"environment": {"VLLM_CPU_KVCACHE_SPACE": "2"}},
    ],
    ids=str,
)
def test_what_changes_no_kv_shares(namespace: Namespaces, args: dict[str, Any]) -> None:
    assert namespace(**args) == namespace()


def test_the_spelling_of_a_path_is_a_label(
    namespace: Namespaces, llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = folder / "link"
    link.symlink_to(llama)
    monkeypatch.chdir(folder)
    found = {
        label_aside(namespace(model=name)) for name in (str(llama), "./llama", "llama", str(link))
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "args",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 2 * BLOCK},
        {"load_format": "dummy"},
        {"load_format": "safetensors"},
        {"hf_overrides": {"rope_theta": 500_000.0}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": {"architectures": ["MistralForCausalLM"]}},
        {"trust_remote_code": True},
        {"additional_config": {"of": "a platform"}},
        {"performance_mode": "throughput"},
        {"environment": {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"}},
        {"environment": {"VLLM_PLUGINS": "somebodys"}},
        {"environment": {"NVIDIA_TF32_OVERRIDE": "1"}},
    ],
    ids=str,
)
def test_what_may_change_kv_does_not_share(namespace: Namespaces, args: dict[str, Any]) -> None:
    assert label_aside(namespace(**args)).digest() != label_aside(namespace()).digest()


def test_quantisation_at_load_does_not_share(namespace: Namespaces) -> None:
    half = namespace(dtype="bfloat16")
    assert namespace(dtype="bfloat16", quantization="fp8").settings != half.settings


def test_made_up_weights_are_parted_by_config_and_seed(namespace: Namespaces, phi3: Path) -> None:
    made = [
        {},
        {"seed": 1},
        {"hf_overrides": {"num_hidden_layers": 2}},
        {"model": str(phi3)},
    ]
    found = {label_aside(namespace(load_format="dummy", **args)).digest() for args in made}
    assert len(found) == len(made)


def test_a_length_parts_a_model_whose_rope_asks_for_it(namespace: Namespaces, phi3: Path) -> None:
    short, border, long, longer = (
        namespace(model=str(phi3), max_model_len=length) for length in (256, 512, 1024, 2048)
    )
    assert short == border != long == longer


def test_a_description_is_the_same_in_another_process(namespace: Namespaces) -> None:
    """No address, counter or random number of this process is in it."""
    import vllm.config

    assert describe(vllm.config.VllmConfig()) == describe(vllm.config.VllmConfig())
    assert namespace() == namespace()


def test_what_a_gpu_can_do_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it vLLM chooses kernels: weights in FP8 meet activations in 8 or in 16 bits."""
    import torch

    from penstock.connectors.vllm.device import WorkerDevice
    from penstock.transfer.paged import PagedMemory

    layers: Any = SimpleNamespace(static_forward_context={"a": None})
    config = SimpleNamespace(compilation_config=layers)

    def layout(capability: tuple[int, int]) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        memory = PagedMemory((), 1)
        device = WorkerDevice(memory, "layers", ("a",), torch.device("cuda", 0), 0, 1, 0, 1)
        return device.described(config).layout

    assert layout((8, 0)) != layout((9, 0)) == layout((9, 0))


# Media, as vLLM itself makes and sends them.


@pytest.mark.parametrize("kwargs", [{}, {"size": 5}])
def test_vllms_names_for_media_do_not_tell_what_they_are(kwargs: dict[str, Any]) -> None:
    """The name that a user chose, with a processor's argument, looks like a hash of a picture."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalSharedField,
        PlaceholderRange,
    )
    from vllm.multimodal.inputs import MultiModalKwargsItem as Item
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    def sent(identifier: str, pixels: list[float]) -> Any:
        field = MultiModalSharedField(batch_size=1)
        element = MultiModalFieldElem(data=torch.tensor(pixels), field=field)
        feature = MultiModalFeatureSpec(
            data=Item({"pixel_values": element}),
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=1, length=4),
            mm_hash=identifier,
        )
        decoder = MsgpackDecoder(MultiModalFeatureSpec)
        return decoder.decode(MsgpackEncoder().encode(feature))

    class Asked:
        def __init__(self, feature: Any) -> None:
            self.prompt_token_ids = self.all_token_ids = list(range(8))
            self.mm_features = [feature]

    def keys(identifier: str, pixels: list[float]) -> Any:
        base = Namespace("m", "w", "d", "l", 4)
        found = Naming().keys(base, Asked(sent(identifier, pixels)))
        return None if found is None else found.first(8)

    counter = "renderer0-mm-1-image-0"
    if kwargs:
        from vllm.multimodal.hasher import MultiModalHasher

        counter = MultiModalHasher.hash_kwargs("blake3", image=counter, kwargs=kwargs)
        assert len(counter) == 64
    one, other = keys(counter, [1.0, 2.0]), keys(counter, [3.0, 4.0])
    assert one is not None
    assert other is not None
    assert not set(one) & set(other)
    assert keys("another name", [1.0, 2.0]) == one


# Engines that share a store.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


def wait_for(server: RedisServer, num_values: int) -> None:
    import redis

    end = time.monotonic() + 600
    while redis.Redis(port=server.port).dbsize() < num_values:  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.1)


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    num_loaded: int

    def is_as(self, other: Answer, num_loaded: int = 0) -> bool:
        """Two engines that do the same differ in the last bits of a sum."""
        return (
            self.tokens == other.tokens
            and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)
            and self.num_loaded == num_loaded
        )


def ask(vllm: Vllm, prompt: list[int], lora: Any = None) -> Answer:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    output = vllm.llm.generate(
        [{"prompt_token_ids": prompt}], params, use_tqdm=False, lora_request=lora
    )[0]
    answer = output.outputs[0]
    chosen = [
        step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    told = (output.kv_transfer_params or {}).get("penstock", {})
    return Answer(list(answer.token_ids), chosen, sum(told.get("loaded_tokens", {}).values()))


@pytest.mark.timeout(2400)  # four engines, one after the other, perhaps on a busy machine
@pytest.mark.skipif(is_skipped(WHY_NOT), reason=str(WHY_NOT))
def test_engines_share_what_is_the_same_and_nothing_else(
    start: Start, server: RedisServer, phi3: Path, folder: Path
) -> None:
    from vllm.lora.request import LoRARequest

    prompt = [token % VOCABULARY for token in tokens(3 * BLOCK + 3, 400)]
    stays, changes = make_adapter(folder / "stays", 1), make_adapter(folder / "changes", 2)
    newer = make_adapter(folder / "newer", 3)
    model = {"model": str(phi3), "skip_tokenizer_init": True}
    long = {"max_model_len": 1024, "enable_lora": True, "max_lora_rank": 8, "max_cpu_loras": 8}
    store = {"always_load": True, "set": {"remote.lookup_deadline_seconds": 30}}

    # What vLLM alone answers.
    plain = Vllm(**model, **long)
    alone = {"": ask(plain, prompt)}
    for number, path in enumerate((stays, changes, newer), 1):
        alone[path.name] = ask(plain, prompt, LoRARequest(path.name, number, str(path)))
    plain.close()
    assert len({tuple(answer.tokens) for answer in alone.values()}) == len(alone)

    # With other factors of its rope, the model computes other KV from the same files.
    short = start(remote=server.url, given={**model, "max_model_len": 256}, **store)
    assert ask(short, prompt).tokens != alone[""].tokens
    wait_for(server, 3)
    short.close()

    one = start(remote=server.url, given={**model, **long}, **store)
    assert ask(one, prompt).is_as(alone[""])
    assert ask(one, prompt, LoRARequest("stays", 1, str(stays))).is_as(alone["stays"])
    # Overwritten after it was used: unloaded and loaded again, as vLLM's server does.
    assert ask(one, prompt, LoRARequest("changes", 2, str(changes))).is_as(alone["changes"])
    shutil.copy(newer / "adapter_model.safetensors", changes / "adapter_model.safetensors")
    one.forget()
    assert ask(one, prompt, LoRARequest("changes", 3, str(changes))).is_as(alone["newer"])
    # Replaced in place, under one id.
    shutil.copy(stays / "adapter_model.safetensors", changes / "adapter_model.safetensors")
    one.forget()
    in_place = LoRARequest("changes", 3, str(changes), load_inplace=True)
    assert ask(one, prompt, in_place).is_as(alone["stays"])
    one.forget()
    assert ask(one, prompt, LoRARequest("changes", 3, str(changes))).is_as(alone["stays"])
    one.forget()
    assert ask(one, prompt).is_as(alone[""], 3 * BLOCK)
    wait_for(server, 12)
    one.close()

    # What is the same is found by another process, with another length beyond the border, other
    # limits and another name for the adapter.
    given = {**model, **long, "max_model_len": 2048, "max_num_seqs": 3}
    other = start(remote=server.url, given=given, **store)
    lora = LoRARequest("by another name", 9, str(stays))
    for found, name in ((None, ""), (lora, "stays")):
        loaded = ask(other, prompt, found)
        assert loaded.is_as(alone[name], 3 * BLOCK)
        local = ask(other, prompt, found)
        assert (local.tokens, local.logprobs) == (loaded.tokens, loaded.logprobs), "to the bit"
    # This folder holds now what `stays` does, and has been so since before this process began.
    again = ask(other, prompt, LoRARequest("changes", 4, str(changes)))
    assert again.is_as(alone["stays"], 3 * BLOCK)
