"""What KV of the same tokens is called: two that could differ never share a name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connectors.config_objects import config_object
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.vllm import configuration, identity
from penstock.connectors.vllm.adapters import Adapters
from penstock.connectors.vllm.identity import (
    Naming,
    RequestKeys,
    drafter_name,
    model_namespace,
    weights_name,
)
from penstock.connectors.vllm.orders import Shard
from penstock.errors import ConfigError
from penstock.groups.kinds import Group, Groups, Kind
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


def image(content: str, offset: int, length: int = 3, modality: str = "image") -> Any:
    pixels = SimpleNamespace(data=torch.tensor(list(content.encode())))
    return SimpleNamespace(
        modality=modality,
        identifier=f"{modality} {content}",
        mm_position=SimpleNamespace(offset=offset, length=length, is_embed=None),
        data={"pixel_values": pixels},
    )


def keys_of(asked: Any) -> RequestKeys:
    found = Naming().keys(BASE, asked)
    assert found is not None
    return found


def keys(token_ids: Sequence[int], **fields: Any) -> list[bytes]:
    return list(keys_of(request(token_ids, **fields)).first(len(token_ids)))


# Keys of a request.


@given(token_ids=tokens, steps=st.lists(st.integers(0, 45), max_size=8))
def test_keys_grow_with_the_tokens_and_are_those_of_the_chain(
    token_ids: list[int], steps: list[int]
) -> None:
    asked = request()
    found = keys_of(asked)
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
    found = keys_of(asked)
    for known in (1, 3, 8, 9, 22, 24, 40):
        asked.all_token_ids[:] = token_ids[:known]
        assert found.first(known) == at_once[: known // 4]


def test_a_request_without_media_may_say_none() -> None:
    assert keys(range(8), mm_features=None) == keys(range(8))


# Keys of several groups.


PLAIN = Groups((Group(0, Kind.FULL, 4),))
SEVERAL = Groups(
    (
        Group(0, Kind.WINDOW, 8, 24),
        Group(1, Kind.FULL, 4),
        Group(3, Kind.FULL, 4),  # the group before it is not kept
        Group(4, Kind.STATE, 16),
    )
)


def group_keys(groups: Groups, token_ids: Sequence[int], **fields: Any) -> dict[int, list[bytes]]:
    found = Naming().keys(BASE, request(token_ids, **fields), groups)
    assert found is not None
    return {group.index: list(found.of_group(group, len(token_ids))) for group in groups}


@given(token_ids=tokens)
def test_one_plain_group_has_the_keys_that_it_always_had(token_ids: list[int]) -> None:
    assert group_keys(PLAIN, token_ids) == {0: chain(BASE, token_ids)}


def test_one_group_that_is_not_plain_has_keys_of_its_own() -> None:
    state = Groups((Group(0, Kind.STATE, 4),))
    assert not {*group_keys(state, range(16))[0]} & {*chain(BASE, list(range(16)))}


@given(token_ids=tokens)
def test_every_block_of_every_group_has_a_key_of_its_own(token_ids: list[int]) -> None:
    found = group_keys(SEVERAL, token_ids)
    for group in SEVERAL:
        assert len(found[group.index]) == len(token_ids) // group.block_tokens
    everything = [key for keys in found.values() for key in keys]
    assert len({*everything, *chain(BASE, token_ids)}) == len(everything) + len(token_ids) // 4


@given(token_ids=tokens, other=tokens, data=st.data())
def test_a_groups_keys_depend_on_all_tokens_before_their_end_and_no_others(
    token_ids: list[int], other: list[int], data: st.DataObject
) -> None:
    num_same = data.draw(st.integers(0, len(token_ids)))
    one = group_keys(SEVERAL, token_ids)
    two = group_keys(SEVERAL, [*token_ids[:num_same], 200_001, *other])
    for group in SEVERAL:
        num_blocks = num_same // group.block_tokens
        assert one[group.index][:num_blocks] == two[group.index][:num_blocks]
        assert not {*one[group.index][num_blocks:]} & {*two[group.index]}


@given(token_ids=tokens, steps=st.lists(st.integers(0, 45), max_size=8))
def test_keys_of_groups_are_the_same_however_the_tokens_became_known(
    token_ids: list[int], steps: list[int]
) -> None:
    at_once = group_keys(SEVERAL, token_ids)
    asked = request()
    found = Naming().keys(BASE, asked, SEVERAL)
    assert found is not None
    for num_tokens in [*sorted(steps), len(token_ids)]:
        known = min(num_tokens, len(token_ids))
        asked.all_token_ids.extend(token_ids[len(asked.all_token_ids) : known])
        for group in SEVERAL:
            num_blocks = known // group.block_tokens
            assert found.of_group(group, known) == at_once[group.index][:num_blocks]
    # Fewer than before.
    for group in SEVERAL:
        half = len(token_ids) // 2
        assert found.of_group(group, half) == at_once[group.index][: half // group.block_tokens]


@pytest.mark.parametrize(
    "fields",
    [{"mm_features": [image("one", 0)]}, {"cache_salt": "one"}, {"lora_request": "lora"}],
    ids=str,
)
def test_media_salts_and_adapters_change_the_keys_of_all_groups(
    fields: dict[str, Any], lora: Any
) -> None:
    if "lora_request" in fields:
        fields = {"lora_request": lora}
    plain, other = group_keys(SEVERAL, range(32)), group_keys(SEVERAL, range(32), **fields)
    for group in SEVERAL:
        assert not {*plain[group.index]} & {*other[group.index]}


def test_media_change_a_groups_keys_from_their_block_on() -> None:
    plain = group_keys(SEVERAL, range(48))
    other = group_keys(SEVERAL, range(48), mm_features=[image("one", 21)])
    for group in SEVERAL:
        first = 21 // group.block_tokens
        assert plain[group.index][:first] == other[group.index][:first]
        assert not {*plain[group.index][first:]} & {*other[group.index]}


# The namespace of a request.


def namespace_of(base: Namespace, asked: Any) -> Namespace | None:
    return Naming().namespace(base, asked)


def test_a_plain_request_is_in_the_models_own_namespace() -> None:
    assert namespace_of(BASE, request()) == BASE


def test_salts_part_tenants() -> None:
    salts = [None, "", "one", "other", "salt one"]
    names = [namespace_of(BASE, request(cache_salt=salt)) for salt in salts]
    assert len(set(names)) == len(salts)
    again = namespace_of(BASE, request(cache_salt="one"))
    assert again == names[2]


def test_salts_part_tenants_after_a_reset_too() -> None:
    base = replace(BASE, tenant="reset 5")
    names = {
        namespace_of(kind, request(cache_salt=salt))
        for kind in (BASE, base)
        for salt in (None, "one", "other")
    }
    assert len(names) == 6


@pytest.fixture
def lora(tmp_path: Path) -> Any:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter.safetensors").write_bytes(b"A and B")
    return SimpleNamespace(lora_name="sql", lora_int_id=1, lora_path=str(folder))


def test_adapters_part_requests(lora: Any) -> None:
    adapters = Adapters()
    found = Naming(adapters).namespace(BASE, request(lora_request=lora))
    assert found == replace(BASE, adapter=adapters.name(lora))
    assert found != BASE


def test_an_adapter_that_has_no_name_leaves_its_requests_without_keys() -> None:
    lora = SimpleNamespace(lora_name="sql", lora_int_id=1, lora_path="/nowhere")
    assert namespace_of(BASE, request([1, 2], lora_request=lora)) is None
    assert Naming().keys(BASE, request([1, 2], lora_request=lora)) is None


def test_keys_hold_until_the_adapters_files_change(lora: Any) -> None:
    naming = Naming()
    found = naming.keys(BASE, request([1, 2], lora_request=lora))
    assert found is not None
    assert naming.holds(found)
    Path(lora.lora_path, "adapter.safetensors").write_bytes(b"A and C")
    assert not naming.holds(found)


def test_keys_hold_until_another_picture_has_the_same_name() -> None:
    naming = Naming()
    first, other, plain = image("one", 0), image("other", 0), request([1, 2])
    other.identifier = first.identifier = "chosen by the user"
    found = naming.keys(BASE, request([1, 2], mm_features=[first]))
    aside = naming.keys(BASE, plain)
    assert found is not None
    assert aside is not None
    assert naming.holds(found)
    assert naming.keys(BASE, request([1, 2], mm_features=[other])) is None
    assert not naming.holds(found)
    assert naming.holds(aside)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"resumable": True},
    ],
)
def test_what_its_tokens_do_not_name_has_no_namespace(fields: dict[str, Any]) -> None:
    assert namespace_of(BASE, request([1, 2], **fields)) is None


@pytest.mark.parametrize("fields", [{"prompt_embeds": None}, {"resumable": False}])
def test_fields_that_newer_vllms_have_change_nothing_while_unused(fields: dict[str, Any]) -> None:
    assert namespace_of(BASE, request([1, 2], **fields)) == BASE


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The files of these tests are older than the process that names them.
    monkeypatch.setattr(identity, "process_start", lambda: time.time() + 60)


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


Configs = Callable[..., Any]


@pytest.fixture
def configs(model: Path) -> Configs:
    def make(**changes: Any) -> Any:
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
            "download_dir": None,
            "max_model_len": 1024,
            "model_weights": "",
            "weight_transfer_config": None,
            "lora_config": None,
            **changes,
        }
        names = [
            "model",
            "model_weights",
            "revision",
            "dtype",
            "quantization",
            "seed",
            "hf_config",
            "max_model_len",
        ]
        return config_object(
            "VllmConfig",
            model_config=config_object("ModelConfig", **{name: fields[name] for name in names}),
            cache_config=config_object(
                "CacheConfig", cache_dtype=fields["cache_dtype"], block_size=fields["block_size"]
            ),
            load_config=config_object(
                "LoadConfig",
                load_format=fields["load_format"],
                download_dir=fields["download_dir"],
            ),
            weight_transfer_config=fields["weight_transfer_config"],
            lora_config=fields["lora_config"],
        )

    return make


def shards(num: int = 1, layout: str = "flash: 2 layers", block_bytes: int = 512) -> list[Shard]:
    return [Shard(rank, block_bytes, 100, layout, 1) for rank in range(num)]


def test_the_same_model_has_the_same_namespace(configs: Configs) -> None:
    one = model_namespace(configs(), "0.32.0", shards())
    assert one == model_namespace(configs(), "0.32.0", shards())
    assert one.block_tokens == 16
    assert (one.adapter, one.tenant) == ("", "")


def test_a_lossy_codec_parts_namespaces_and_no_other_does(configs: Configs) -> None:
    plain = model_namespace(configs(), "0.32.0", shards())
    lossy = model_namespace(configs(), "0.32.0", shards(), loss="int8")
    assert lossy.digest() != plain.digest()
    assert model_namespace(configs(), "0.32.0", shards(), loss="").digest() == plain.digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8_e4m3"},
        {"block_size": 32},
        {"hf_config": HfConfig(hidden_size=64, rope_theta=500_000.0)},
        {"hf_config": HfConfig(hidden_size=64, rope_theta=10_000.0, rope_scaling={"factor": 2})},
        {"hf_config": HfConfig(hidden_size=64, rope_theta=10_000.0, architectures=["Other"])},
        {"load_format": "dummy"},
        {"load_format": "safetensors"},
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
    )
    one = model_namespace(configs(hf_config=said), "0.32.0", shards())
    assert one == model_namespace(configs(), "0.32.0", shards())


def test_the_config_of_the_text_model_counts_where_it_is_another(configs: Configs) -> None:
    digests = set()
    for theta in (1.0, 2.0):
        made = configs()
        made.model_config.hf_text_config = HfConfig(rope_theta=theta)
        digests.add(model_namespace(made, "0.32.0", shards()).digest())
    assert len(digests) == 2


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


def test_dummy_weights_of_whole_numbers_are_for_this_run_alone(configs: Configs) -> None:
    """vLLM leaves them as the memory is that it is given, in every process another."""
    assert_for_this_run_alone(configs(load_format="dummy", quantization="gptq_marlin"))


@pytest.mark.parametrize(
    ("fields", "is_named"),
    [
        ({}, True),
        ({"mm_encoder_attn_dtype": None, "mm_encoder_fp8_scale_path": None}, True),
        ({"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": "/scales"}, True),
        ({"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": None}, False),
    ],
)
def test_media_are_left_alone_where_the_encoder_goes_by_what_it_saw_before(
    configs: Configs, fields: dict[str, Any], is_named: bool
) -> None:
    config = configs()
    config.model_config.multimodal_config = config_object("MultiModalConfig", **fields)
    asked = request(range(8), mm_features=[image("a", 2)])
    assert (Naming.of(config).keys(BASE, asked) is not None) is is_named
    assert Naming.of(config).keys(BASE, request(range(8))) is not None


def test_weights_that_cannot_be_read_are_for_this_run_alone(
    configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    (tmp_path / "no weights").mkdir()
    for name in (str(tmp_path / "no weights"), "nobody/has-this", "s3://bucket/model"):
        assert_for_this_run_alone(configs(model=name))


def assert_for_this_run_alone(config: Any) -> None:
    assert weights_name(config).startswith("run ")
    assert weights_name(config) != weights_name(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"load_format": "tensorizer"},
        {"load_format": "modelexpress"},
        {"load_format": "somebodys_own"},
        {"model_weights": "s3://bucket/model"},
        {"weight_transfer_config": {"backend": "nccl"}},
        {"hf_config": HfConfig(audio_model_id="somebody/whisper", text_model_id=None)},
    ],
    ids=str,
)
def test_weights_that_do_not_come_from_the_models_files_are_for_this_run_alone(
    configs: Configs, changes: dict[str, Any]
) -> None:
    assert not weights_name(configs()).startswith("run ")
    assert_for_this_run_alone(configs(**changes))


def test_weights_are_looked_for_where_vllm_reads_them(
    configs: Configs, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"other weights")
    found = weights_name(configs(model_weights=str(other)))
    assert found == weights_name(configs(model=str(other)))
    assert found != weights_name(configs())


def test_weights_written_since_the_process_began_are_for_this_run_alone(
    configs: Configs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may have read what was there before."""
    monkeypatch.setattr(identity, "process_start", lambda: model.stat().st_ctime - 1)
    assert_for_this_run_alone(configs())


def test_the_path_to_the_weights_may_be_spelled_in_any_way(
    configs: Configs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    link = model.parent / "link"
    link.symlink_to(model)
    spellings = [str(model), "model", "./model", str(link), f"{model}/../model"]
    assert len({weights_name(configs(model=spelling)) for spelling in spellings}) == 1


# The namespace of a model with several groups, stages or a drafter.


def test_groups_are_part_of_the_namespace(configs: Configs) -> None:
    names = {
        model_namespace(configs(), "0.32.0", shards(), block_tokens=size, groups=words).digest()
        for size in (None, 8)
        for words in ("", "0: Full", "0: Full; 1: Window")
    }
    assert len(names) == 6


def test_a_plain_model_is_called_what_it_was_before_there_were_groups(configs: Configs) -> None:
    before = model_namespace(configs(), "0.32.0", shards())
    after = model_namespace(configs(), "0.32.0", shards(), block_tokens=16, groups="")
    assert before == after
    assert before.layout == "vllm 0.32.0: flash: 2 layers"


def staged(*layouts: str, sizes: Sequence[int] = (512, 512)) -> list[Shard]:
    return [
        Shard(rank, size, 100, layout, 1, stage=stage)
        for stage, (layout, size) in enumerate(zip(layouts, sizes, strict=True))
        for rank in range(2)
    ]


def test_stages_may_have_layouts_of_their_own(configs: Configs) -> None:
    names = [
        model_namespace(configs(), "0.32.0", found).digest()
        for found in (
            shards(4),
            staged("2 layers", "2 layers"),
            staged("2 layers", "3 layers", sizes=(512, 768)),
            staged("3 layers", "2 layers", sizes=(768, 512)),
        )
    ]
    assert len(set(names)) == 4


def test_within_a_stage_all_workers_have_the_same_layout(configs: Configs) -> None:
    found = staged("2 layers", "3 layers", sizes=(512, 768))
    for wrong in (replace(found[3], layout="4 layers"), replace(found[3], block_bytes=512)):
        with pytest.raises(ConfigError, match="different layouts"):
            model_namespace(configs(), "0.32.0", [*found[:3], wrong])


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"drafts")
    return folder


def with_drafter(config: Any, name: Any, method: str = "eagle") -> Any:
    draft = SimpleNamespace(model=str(name), revision=None)
    # Not a field: here only its weights matter.
    config.speculative_config = SimpleNamespace(method=method, draft_model_config=draft)
    return config


def test_without_a_drafter_there_is_nothing_to_name(configs: Configs, drafter: Path) -> None:
    config = configs()
    assert drafter_name(config) == ""
    config.speculative_config = None
    assert drafter_name(config) == ""
    config.speculative_config = SimpleNamespace(method="suffix", draft_model_config=None)
    assert drafter_name(config) == ""
    assert drafter_name(with_drafter(config, drafter, "ngram")) == ""


def test_a_drafter_is_known_by_its_weights(configs: Configs, drafter: Path) -> None:
    without = model_namespace(configs(), "0.32.0", shards())
    one = model_namespace(with_drafter(configs(), drafter), "0.32.0", shards())
    assert one == model_namespace(with_drafter(configs(), drafter), "0.32.0", shards())
    assert (
        one.weights == f"{without.weights} drafter {drafter_name(with_drafter(configs(), drafter))}"
    )
    (drafter / "model.safetensors").write_bytes(b"Drafts")
    other = model_namespace(with_drafter(configs(), drafter), "0.32.0", shards())
    assert len({without.digest(), one.digest(), other.digest()}) == 3


def test_a_drafter_in_the_models_own_files_is_named_with_it(configs: Configs, model: Path) -> None:
    """MTP: the model's fingerprint has its weights already."""
    assert drafter_name(with_drafter(configs(), model, "mtp")) == "of the model"


def assert_drafter_for_this_run_alone(config: Any) -> None:
    assert drafter_name(config).startswith("run ")
    assert drafter_name(config) != drafter_name(config)


def test_a_drafter_that_cannot_be_read_is_for_this_run_alone(
    configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    (tmp_path / "no weights").mkdir()
    for name in (tmp_path / "no weights", "nobody/has-this", "s3://bucket/model"):
        assert_drafter_for_this_run_alone(with_drafter(configs(), name))


def test_a_drafter_written_since_the_process_began_is_for_this_run_alone(
    configs: Configs, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "process_start", lambda: drafter.stat().st_ctime - 1)
    assert_drafter_for_this_run_alone(with_drafter(configs(), drafter))


def test_a_drafter_in_the_hubs_cache_may_be_new(
    configs: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files there are never overwritten, so the first run may use what it has just loaded."""
    snapshot = tmp_path / "hub" / "models--some--drafter" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"drafts")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(identity, "process_start", lambda: 0.0)
    config = with_drafter(configs(download_dir=str(tmp_path / "hub")), "some/drafter")
    assert not drafter_name(config).startswith("run ")
    assert drafter_name(config) == drafter_name(config)


# Stores that exist: these digests were computed by the code before there were groups.


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever plugins and variables this machine has, they do not count here."""
    monkeypatch.setattr(configuration, "_plugins", list)
    monkeypatch.setattr(configuration, "_environment", lambda _: {})


def fixed_config() -> Any:
    model = config_object(
        "ModelConfig",
        model="somebody/model",
        model_weights="",
        revision=None,
        dtype="torch.bfloat16",
        quantization=None,
        seed=0,
        hf_config=HfConfig(hidden_size=64, rope_theta=10_000.0),
        max_model_len=1024,
    )
    return config_object(
        "VllmConfig",
        model_config=model,
        cache_config=config_object("CacheConfig", cache_dtype="auto", block_size=16),
        load_config=config_object("LoadConfig", load_format="dummy", download_dir=None),
        parallel_config=config_object("ParallelConfig", tensor_parallel_size=2, world_size=2),
        weight_transfer_config=None,
        lora_config=None,
    )


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("num_workers", "digest"),
    [
        (1, "63a8a3a72fd6d03aca5c45ab9f24ba328d3c22548b7cd35aa056093f7ed06eda"),
        (2, "3cf5a4adb068ccb56b91a93c29955df1773dabfe17afbd9c0ef60ea71fc644f3"),
    ],
)
def test_old_stores_of_plain_models_are_found(num_workers: int, digest: str) -> None:
    layout = "FLASH_ATTN on cuda 9.0: 2 layers of 1x[2, 16, 64]"
    found = model_namespace(
        fixed_config(), "0.32.0", shards(num_workers, layout), block_tokens=16, groups=""
    )
    assert found.digest().hex() == digest


@pytest.mark.usefixtures("bare")
def test_old_blocks_of_plain_models_are_found() -> None:
    layout = "FLASH_ATTN on cuda 9.0: 2 layers of 1x[2, 16, 64]"
    base = model_namespace(fixed_config(), "0.32.0", shards(2, layout), block_tokens=16, groups="")
    plain = Groups((Group(0, Kind.FULL, 16),))
    found = Naming().keys(base, request(range(40), cache_salt="s"), plain)
    assert found is not None
    assert [key.hex() for key in found.of_group(plain.groups[0], 40)] == [
        "b84a4f3e06cb390e56cd1198fbec44f6de44fb66201d032f024594e008d0c75d",
        "0a4caf633e192a72654edec610e45c1d392695d37621cfc0621e397b8288a04e",
    ]
