from __future__ import annotations

import os
import subprocess
import sys
from array import array
from dataclasses import fields, replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.keys import KeyChain, Namespace, chain

NAMESPACE = Namespace("smollm2-135m", "sha256:abc", "bf16", "LKTHD", 16)
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_keys_are_as_written_down() -> None:
    """Spelled out once more by hand: a change of encoding makes every stored block unfindable."""
    hasher = blake3(b"penstock namespace 2")
    for name, value in (
        ("weights", "sha256:abc"),
        ("dtype", "bf16"),
        ("layout", "LKTHD"),
        ("block_tokens", "16"),
        ("rope", ""),
        ("adapter", ""),
        ("shard_rank", "0"),
        ("shard_size", "1"),
        ("tenant", ""),
        ("settings", ""),
    ):
        for part in (name.encode(), value.encode()):
            hasher.update(len(part).to_bytes(8, "little") + part)
    root = blake3(hasher.digest()).digest()
    tokens = list(range(32))
    first = blake3(root + b"".join(t.to_bytes(4, "little") for t in tokens[:16])).digest()
    second = blake3(first + b"".join(t.to_bytes(4, "little") for t in tokens[16:])).digest()
    assert chain(NAMESPACE, tokens) == [first, second]
    assert second.hex() == "938660a64f536a3098b6f16bd9a7aef600866227cdd378e6ef35668db83ae586"


def test_the_models_name_is_a_label() -> None:
    """One file has many spellings; what tells models apart is the weights' fingerprint."""
    spelled = replace(NAMESPACE, model="./smollm2-135m")
    assert spelled.digest() == NAMESPACE.digest()
    assert chain(spelled, range(64)) == chain(NAMESPACE, range(64))
    assert spelled.block_spec(4096) == NAMESPACE.block_spec(4096)
    assert dict(spelled.block_spec(4096).description)["model"] == "./smollm2-135m"


def test_a_description_is_for_people_and_bounded() -> None:
    tenant = replace(NAMESPACE, tenant="acme", adapter="sql", rope="x" * 1000)
    about = dict(tenant.block_spec(4096).description)
    assert about.pop("rope") == "x" * 119 + "…"
    assert about == {
        "model": "smollm2-135m",
        "weights": "sha256:abc",
        "dtype": "bf16",
        "layout": "LKTHD",
        "block_tokens": "16",
    }


def test_every_part_of_the_namespace_counts() -> None:
    changed = {
        "weights": "sha256:abd",
        "dtype": "fp32",
        "layout": "KLTHD",
        "block_tokens": 32,
        "rope": "yarn 8",
        "adapter": "lora-1",
        "shard_rank": 1,
        "shard_size": 2,
        "tenant": "acme",
        "settings": "digest",
        "loss": "int8",
    }
    base = replace(NAMESPACE, shard_size=3)
    assert {"model", *changed} == {field.name for field in fields(Namespace)}
    digests = {base.digest()} | {replace(base, **{k: v}).digest() for k, v in changed.items()}  # type: ignore[arg-type]
    assert len(digests) == len(changed) + 1


def test_neighbouring_fields_cannot_run_into_each_other() -> None:
    assert replace(NAMESPACE, model="ab", weights="c").digest() != (
        replace(NAMESPACE, model="a", weights="bc").digest()
    )


def test_tenants_and_adapters_share_a_store_but_no_key() -> None:
    tenant = replace(NAMESPACE, tenant="acme", adapter="lora-1")
    assert tenant.physical() == NAMESPACE
    assert not set(chain(tenant, range(64))) & set(chain(NAMESPACE, range(64)))


@given(tokens_lists, st.lists(st.integers(0, 40), max_size=6))
def test_appending_gives_the_same_keys_as_the_whole(tokens: list[int], cuts: list[int]) -> None:
    growing = KeyChain(NAMESPACE)
    start = 0
    for cut in cuts:
        growing.extend(tokens[start : start + cut])
        start += cut
    for token in tokens[start:]:
        growing.append(token)
    assert growing.keys == chain(NAMESPACE, tokens)
    assert len(growing.keys) == len(tokens) // 16


@given(tokens_lists, tokens_lists)
def test_keys_agree_exactly_as_far_as_the_blocks_do(one: list[int], two: list[int]) -> None:
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    for index, (a, b) in enumerate(zip(chain(NAMESPACE, one), chain(NAMESPACE, two), strict=False)):
        assert (a == b) == (index < common // 16)


def test_any_sequence_of_whole_numbers_will_do() -> None:
    expected = chain(NAMESPACE, range(100))
    assert chain(NAMESPACE, array("q", range(100))) == expected
    assert chain(NAMESPACE, iter(range(100))) == expected


@pytest.mark.parametrize("bad", [[-1], [2**32], ["a"], [1.5], [None]])
def test_a_bad_token_is_refused_and_appends_nothing(bad: list[object]) -> None:
    growing = KeyChain(NAMESPACE, range(20))
    with pytest.raises(ValueError, match="token ids must be integers"):
        growing.extend(bad)  # type: ignore[arg-type]
    growing.extend(range(20, 32))
    assert growing.keys == chain(NAMESPACE, range(32))


@pytest.mark.parametrize(
    "fields_", [{"block_tokens": 0}, {"shard_rank": 1}, {"shard_rank": -1}, {"shard_size": 0}]
)
def test_an_impossible_namespace_is_refused(fields_: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        replace(NAMESPACE, **fields_)


def test_keys_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    program = (
        "from penstock.keys import *;"
        "print(chain(Namespace('m', 'w', 'bf16', 'l', 16), range(64))[-1].hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345", "random")
    }
    assert len(answers) == 1
