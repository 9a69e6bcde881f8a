"""What KV of the same tokens is called: two that could differ never share a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.vllm.identity import (
    RequestKeys,
    adapter_name,
    model_namespace,
    namespace_of,
    weights_name,
)
from penstock.connectors.vllm.orders import Shard
from penstock.errors import ConfigError
from penstock.keys import Namespace, chain

BASE = Namespace("model", "weights", "bfloat16", "layout", block_tokens=4)
tokens = st.lists(st.integers(0, 200_000), max_size=40)


def request(token_ids: Sequence[int] = (), **fields: Any) -> SimpleNamespace:
    known: dict[str, Any] = {
        "prompt_token_ids": list(token_ids),
        "all_token_ids": list(token_ids),
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**{**known, **fields})


def image(identifier: str, offset: int, length: int = 3, modality: str = "image") -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(modality=modality, identifier=identifier, mm_position=place)


def keys(token_ids: Sequence[int], **fields: Any) -> list[bytes]:
    asked = request(token_ids, **fields)
    return list(RequestKeys(BASE, asked).first(len(token_ids)))


# Keys of a request.


@given(token_ids=tokens, steps=st.lists(st.integers(0, 45), max_size=8))
def test_keys_grow_with_the_tokens_and_are_those_of_the_chain(
    token_ids: list[int], steps: list[int]
) -> None:
    asked = request()
    found = RequestKeys(BASE, asked)
    for num_tokens in [*sorted(steps), len(token_ids)]:
        known = min(num_tokens, len(token_ids))
        # vLLM appends to the list as tokens are sampled.
        asked.all_token_ids.extend(token_ids[len(asked.all_token_ids) : known])
        assert found.first(known) == chain(BASE, token_ids[:known])
    assert found.first(len(token_ids) // 2) == chain(BASE, token_ids[: len(token_ids) // 2])


@given(token_ids=tokens.filter(lambda found: len(found) >= 8), data=st.data())
def test_media_change_the_keys_from_their_block_on_and_not_before(
    token_ids: list[int], data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, len(token_ids) - 1))
    plain = keys(token_ids)
    one = keys(token_ids, mm_features=[image("one", offset)])
    other = keys(token_ids, mm_features=[image("other", offset)])
    first = offset // BASE.block_tokens
    assert plain[:first] == one[:first] == other[:first]
    for index in range(first, len(plain)):
        assert len({plain[index], one[index], other[index]}) == 3


def test_what_an_image_is_and_where_it_lies_counts() -> None:
    token_ids = list(range(16))
    features = [
        [],
        [image("a", 5)],
        [image("b", 5)],
        [image("a", 6)],
        [image("a", 5, length=4)],
        [image("a", 5, modality="audio")],
        [image("a", 5), image("a", 9)],
        [image("a", 5), image("b", 9)],
        [image("a", 5), image("b", 5)],
    ]
    last = [keys(token_ids, mm_features=found)[-1] for found in features]
    assert len(set(last)) == len(features)


def test_media_are_the_same_however_the_tokens_became_known() -> None:
    token_ids = list(range(40))
    features = [image("a", 2), image("b", 8, 12), image("c", 23)]
    at_once = keys(token_ids, mm_features=features)
    asked = request(mm_features=features)
    found = RequestKeys(BASE, asked)
    for known in (1, 3, 8, 9, 22, 24, 40):
        asked.all_token_ids[:] = token_ids[:known]
        assert found.first(known) == at_once[: known // 4]


def test_a_request_without_media_may_say_none() -> None:
    assert keys(range(8), mm_features=None) == keys(range(8))


# The namespace of a request.


def no_adapters(lora_request: Any) -> str:
    raise AssertionError("there is none")


def test_a_plain_request_is_in_the_models_own_namespace() -> None:
    assert namespace_of(BASE, request(), no_adapters) == BASE


def test_salts_part_tenants() -> None:
    salts = [None, "", "one", "other", "salt one"]
    names = [namespace_of(BASE, request(cache_salt=salt), no_adapters) for salt in salts]
    assert len(set(names)) == len(salts)
    again = namespace_of(BASE, request(cache_salt="one"), no_adapters)
    assert again == names[2]


def test_salts_part_tenants_after_a_reset_too() -> None:
    base = replace(BASE, tenant="reset 5")
    names = {
        namespace_of(kind, request(cache_salt=salt), no_adapters)
        for kind in (BASE, base)
        for salt in (None, "one", "other")
    }
    assert len(names) == 6


def test_adapters_part_requests() -> None:
    lora = SimpleNamespace(lora_name="sql", lora_path="/lora/sql")
    found = namespace_of(BASE, request(lora_request=lora), lambda asked: f"<{asked.lora_name}>")
    assert found == replace(BASE, adapter="<sql>")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"resumable": True},
    ],
)
def test_what_its_tokens_do_not_name_has_no_namespace(fields: dict[str, Any]) -> None:
    assert namespace_of(BASE, request([1, 2], **fields), no_adapters) is None


@pytest.mark.parametrize("fields", [{"prompt_embeds": None}, {"resumable": False}])
def test_fields_that_newer_vllms_have_change_nothing_while_unused(fields: dict[str, Any]) -> None:
    assert namespace_of(BASE, request([1, 2], **fields), no_adapters) == BASE


# Adapters.


def lora(path: Path | str, name: str = "sql") -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=str(path))


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"A and B")
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    return folder


def test_an_adapter_is_known_by_its_weights(adapter: Path) -> None:
    before = adapter_name(lora(adapter))
    assert adapter_name(lora(adapter)) == before
    (adapter / "adapter_model.safetensors").write_bytes(b"A and C")
    assert adapter_name(lora(adapter)) != before
    assert adapter_name(lora(adapter, "other")) != adapter_name(lora(adapter))
    assert adapter_name(None) == ""


# Rank, alpha and the like stand there: the same matrices may be scaled otherwise.
def test_an_adapter_is_known_by_its_config_too(adapter: Path) -> None:
    before = adapter_name(lora(adapter))
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 64}')
    assert adapter_name(lora(adapter)) != before


def test_an_adapter_whose_files_are_not_here_is_for_this_run_alone() -> None:
    found = adapter_name(lora("someone/on-the-hub"))
    assert found == adapter_name(lora("someone/on-the-hub"))
    assert "run " in found
    assert found != adapter_name(lora("someone/on-the-hub", "other"))


# The namespace of a model.


class HfConfig:
    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __repr__(self) -> str:  # names a test, alike in every run
        return f"HfConfig({self._fields})"

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


Configs = Callable[..., SimpleNamespace]


@pytest.fixture
def configs(model: Path) -> Configs:
    def make(**changes: Any) -> SimpleNamespace:
        fields: dict[str, Any] = {
            "model": str(model),
            "revision": None,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "seed": 0,
            "hf_config": HfConfig(hidden_size=64, rope_theta=10_000.0, _name_or_path="here"),
            "cache_dtype": "auto",
            "block_size": 16,
            "load_format": "auto",
            **changes,
        }
        names = ("model", "revision", "dtype", "quantization", "seed", "hf_config")
        return SimpleNamespace(
            model_config=SimpleNamespace(**{name: fields[name] for name in names}),
            cache_config=SimpleNamespace(
                cache_dtype=fields["cache_dtype"], block_size=fields["block_size"]
            ),
            load_config=SimpleNamespace(load_format=fields["load_format"]),
        )

    return make


def shards(num: int = 1, layout: str = "flash: 2 layers", block_bytes: int = 512) -> list[Shard]:
    return [Shard(rank, block_bytes, 100, layout, 1) for rank in range(num)]


def test_the_same_model_has_the_same_namespace(configs: Configs) -> None:
    one = model_namespace(configs(), "0.32.0", shards())
    assert one == model_namespace(configs(), "0.32.0", shards())
    assert one.block_tokens == 16
    assert (one.adapter, one.tenant) == ("", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8_e4m3"},
        {"block_size": 32},
        {"hf_config": HfConfig(hidden_size=64, rope_theta=500_000.0)},
        {"hf_config": HfConfig(hidden_size=64, rope_theta=10_000.0, rope_scaling={"factor": 2})},
        {"load_format": "dummy"},
        {"version": "0.31.0"},
        {"shards": shards(2)},
        {"shards": shards(layout="triton: 2 layers")},
    ],
    ids=str,
)
def test_all_that_makes_kv_differ_parts_namespaces(
    configs: Configs, changes: dict[str, Any]
) -> None:
    plain = model_namespace(configs(), "0.32.0", shards())
    version, parts = changes.pop("version", "0.32.0"), changes.pop("shards", shards())
    other = model_namespace(configs(**changes), version, parts)
    assert other.digest() != plain.digest()


def test_other_weights_under_the_same_name_part_namespaces(configs: Configs, model: Path) -> None:
    before = model_namespace(configs(), "0.32.0", shards())
    (model / "model.safetensors").write_bytes(b"Weights")
    after = model_namespace(configs(), "0.32.0", shards())
    assert after.weights != before.weights
    assert replace(after, weights=before.weights) == before


def test_what_a_config_says_of_itself_parts_nothing(configs: Configs) -> None:
    said = HfConfig(
        hidden_size=64,
        rope_theta=10_000.0,
        _name_or_path="elsewhere",
        transformers_version="5.17",
        architectures=["Renamed"],
    )
    one = model_namespace(configs(hf_config=said), "0.32.0", shards())
    assert one == model_namespace(configs(), "0.32.0", shards())


def test_a_config_may_hold_what_json_does_not_know(configs: Configs) -> None:
    odd = HfConfig(dtype=complex(1, 2), path=Path("/x"), nested={"set": {3}})
    first = model_namespace(configs(hf_config=odd), "0.32.0", shards())
    assert first == model_namespace(configs(hf_config=odd), "0.32.0", shards())


@pytest.mark.parametrize(
    "different",
    [
        [*shards(1), Shard(1, 512, 100, "triton: 2 layers", 1)],
        [*shards(1), Shard(1, 1024, 100, "flash: 2 layers", 1)],
        [],
    ],
)
def test_workers_that_keep_kv_differently_are_refused(
    configs: Configs, different: list[Shard]
) -> None:
    with pytest.raises(ConfigError, match="different layouts"):
        model_namespace(configs(), "0.32.0", different)


def test_dummy_weights_are_known_by_their_seed(configs: Configs) -> None:
    names = [weights_name(configs(load_format="dummy", seed=seed)) for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    assert weights_name(configs(load_format="LoadFormat.DUMMY")) == names[0]


def test_weights_that_cannot_be_read_are_for_this_run_alone(
    configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    (tmp_path / "no weights").mkdir()
    for name in (str(tmp_path / "no weights"), "nobody/has-this", "s3://bucket/model"):
        found = configs(model=name)
        assert weights_name(found).startswith("run ")
        assert weights_name(found) != weights_name(found)
