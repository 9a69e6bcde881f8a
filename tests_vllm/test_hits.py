"""What was saved is loaded, from DRAM and from disk, and nobody can tell by the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BLOCK, Faults, Start, Vllm, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module")
def vllm(start: Start, faults: Faults, folder: Path) -> Vllm:
    settings = {"transfer.load_deadline_seconds": 8.0}
    return start(disk=folder, set=settings, always_load=True)


def test_a_hit_in_dram_answers_as_a_cold_prompt_and_a_local_hit_do(vllm: Vllm, plain: Vllm) -> None:
    prompt = tokens(7 * BLOCK + 5, 1)
    expected = plain.answers([prompt])[0]
    cold, loaded = vllm.answer(prompt)
    assert (cold, loaded) == (expected, {})
    local, loaded = vllm.answer(prompt)
    assert (local, loaded) == (expected, {})
    vllm.forget()
    hit, loaded = vllm.answer(prompt)
    assert (hit, loaded) == (expected, {"host": 7 * BLOCK})


def test_a_whole_prompt_is_hit(vllm: Vllm, plain: Vllm) -> None:
    prompt = tokens(6 * BLOCK, 2)
    expected = plain.answers([prompt])[0]
    vllm.answer(prompt)
    vllm.forget()
    assert vllm.answer(prompt) == (expected, {"host": 6 * BLOCK})


def test_a_prompt_is_hit_as_far_as_it_is_known(vllm: Vllm, plain: Vllm) -> None:
    known = tokens(4 * BLOCK, 3)
    vllm.answer([*known, *tokens(50, 4)])
    vllm.forget()
    other = [*known, *tokens(60, 5)]
    assert vllm.answer(other) == (plain.answers([other])[0], {"host": 4 * BLOCK})


def test_what_vllm_has_itself_is_not_loaded(vllm: Vllm, plain: Vllm) -> None:
    known = tokens(3 * BLOCK, 6)
    long = [*known, *tokens(3 * BLOCK, 7)]
    vllm.answer(long)
    vllm.forget()
    vllm.answer([*known, 17])  # brings the first three blocks back
    assert vllm.answer(long) == (plain.answers([long])[0], {"host": 3 * BLOCK})


def test_generated_tokens_are_saved_too(vllm: Vllm, plain: Vllm) -> None:
    prompt = tokens(BLOCK, 8)
    answer = vllm.answers([prompt], 2 * BLOCK + 3)[0]
    vllm.forget()
    longer = [*prompt, *answer[: 2 * BLOCK], 99]
    assert vllm.answer(longer) == (plain.answers([longer])[0], {"host": 3 * BLOCK})


def test_a_salt_keeps_tenants_apart(vllm: Vllm) -> None:
    from vllm import SamplingParams

    prompt = tokens(4 * BLOCK, 9)
    params = SamplingParams(temperature=0, max_tokens=4)
    for salt, hit in (("a", False), ("b", False), ("a", True)):
        asked = [{"prompt_token_ids": prompt, "cache_salt": salt}]
        output = vllm.llm.generate(asked, params, use_tqdm=False)[0]
        assert bool(output.kv_transfer_params) is hit, salt
        vllm.forget()


def test_twelve_requests_with_shared_prefixes(vllm: Vllm, plain: Vllm) -> None:
    heads = [tokens(5 * BLOCK, 10), tokens(3 * BLOCK, 11)]
    prompts = [[*heads[n % 2], *tokens(10 + 7 * n, 20 + n)] for n in range(12)]
    expected = plain.answers(prompts)
    assert vllm.answers(prompts) == expected
    vllm.forget()
    outputs = vllm.ask(prompts)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert all(output.num_cached_tokens >= 3 * BLOCK for output in outputs)


def test_a_hit_on_disk(vllm: Vllm, plain: Vllm, faults: Faults) -> None:
    prompt = tokens(6 * BLOCK + 1, 30)
    expected = plain.answers([prompt])[0]
    vllm.answer(prompt)
    vllm.forget()
    faults.empty_host()
    assert vllm.answer(prompt) == (expected, {"disk": 6 * BLOCK})


def test_a_disk_too_slow_for_its_deadline_is_not_waited_for(
    vllm: Vllm, plain: Vllm, faults: Faults
) -> None:
    prompt = tokens(6 * BLOCK + 1, 31)
    expected = plain.answers([prompt])[0]
    vllm.answer(prompt)
    vllm.forget()
    faults.empty_host()
    faults.set(read_delay=20)
    answer, _ = vllm.answer(prompt)
    assert answer == expected
    faults.set()
    assert vllm.answer(prompt)[0] == expected


def test_damaged_blocks_are_computed_again(
    vllm: Vllm, plain: Vllm, faults: Faults, folder: Path
) -> None:
    prompt = tokens(6 * BLOCK + 1, 32)
    expected = plain.answers([prompt])[0]
    vllm.answer(prompt)
    vllm.forget()
    faults.empty_host()
    vllm.answer(tokens(BLOCK + 1, 33))  # by now everything is on disk, and nothing in DRAM
    for slab in folder.rglob("*"):
        if slab.is_file() and slab.stat().st_size > 1 << 20:
            with open(slab, "r+b") as file:
                for place in range(0, slab.stat().st_size, 4096):
                    file.seek(place + 100)
                    file.write(b"\xff\x00\xff")
    assert vllm.answer(prompt)[0] == expected
    vllm.forget()
    again, loaded = vllm.answer(prompt)  # what was computed again was saved again
    assert again == expected
    assert loaded == {"host": 6 * BLOCK}


def test_a_disk_that_fails_is_a_disk_that_has_nothing(
    vllm: Vllm, plain: Vllm, faults: Faults
) -> None:
    prompt = tokens(5 * BLOCK + 1, 34)
    expected = plain.answers([prompt])[0]
    vllm.answer(prompt)
    vllm.forget()
    faults.empty_host()
    faults.set(read_error=1.0, write_error=1.0)
    assert vllm.answer(prompt)[0] == expected
    faults.set()


def test_after_a_reset_nothing_is_found(vllm: Vllm, plain: Vllm) -> None:
    prompt = tokens(5 * BLOCK + 1, 35)
    expected = plain.answers([prompt])[0]
    vllm.answer(prompt)
    vllm.forget(below=True)
    assert vllm.answer(prompt) == (expected, {})
    vllm.forget()
    assert vllm.answer(prompt) == (expected, {"host": 5 * BLOCK})


def test_an_abort_while_loading_leaves_nothing_behind(
    vllm: Vllm, plain: Vllm, faults: Faults
) -> None:
    from vllm import SamplingParams

    prompt = tokens(6 * BLOCK + 1, 36)
    expected = plain.answers([prompt])[0]
    vllm.answer(prompt)
    vllm.forget()
    faults.empty_host()
    faults.set(read_delay=1.0)
    engine = vllm.llm.llm_engine
    engine.add_request("gone", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4))
    import time

    time.sleep(0.5)
    engine.abort_request(["gone"])
    while engine.has_unfinished_requests():
        engine.step()
    faults.set()
    assert vllm.answer(prompt)[0] == expected
    vllm.check_nothing_is_held()
