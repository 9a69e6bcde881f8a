"""Files and names that change under requests: no KV is found or saved under what it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connectors.memory_model import BLOCK_TOKENS
from connectors.pool_model import Request
from connectors.vllm_model import Vllm

PROMPT = list(range(1, 23))  # five full blocks, and two tokens


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    model = Vllm(None, is_caching=False, num_host=24)
    yield model
    model.close()
    model.audit()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    write(folder, b"A and B")
    return folder


def write(folder: Path, weights: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(weights)


def lora(path: Path, number: int = 1, **fields: Any) -> Any:
    return SimpleNamespace(
        lora_name=f"sql {number}", lora_int_id=number, lora_path=str(path), **fields
    )


def ask(vllm: Vllm, max_tokens: int = 1, **fields: Any) -> Request:
    request = vllm.add(PROMPT, max_tokens, **fields)
    vllm.flush()
    return request


def loaded(vllm: Vllm, request: Request) -> int:
    answer = vllm.answers[request.request_id]
    return 0 if answer is None else sum(answer["penstock"]["loaded_tokens"].values())


def test_an_adapter_is_found_again_while_its_files_stay(vllm: Vllm, adapter: Path) -> None:
    ask(vllm, lora_request=lora(adapter))
    assert loaded(vllm, ask(vllm, lora_request=lora(adapter))) == 5 * BLOCK_TOKENS


def test_old_kv_is_not_offered_for_new_weights(vllm: Vllm, adapter: Path) -> None:
    ask(vllm, lora_request=lora(adapter))
    write(adapter, b"A and C")
    assert loaded(vllm, ask(vllm, lora_request=lora(adapter, 2))) == 0, "loaded anew"
    assert loaded(vllm, ask(vllm, lora_request=lora(adapter, 2))) == 5 * BLOCK_TOKENS
    assert loaded(vllm, ask(vllm, lora_request=lora(adapter, 1))) == 0, "in place"


def test_what_is_loaded_in_place_is_neither_found_nor_saved(vllm: Vllm, adapter: Path) -> None:
    ask(vllm, lora_request=lora(adapter))
    num_saved = vllm.seen["blocks saved"]
    assert num_saved == 5
    assert loaded(vllm, ask(vllm, lora_request=lora(adapter, load_inplace=True))) == 0
    assert loaded(vllm, ask(vllm, lora_request=lora(adapter))) == 0
    assert vllm.seen["blocks saved"] == num_saved


def test_a_request_under_way_saves_nothing_more_once_the_files_change(
    vllm: Vllm, adapter: Path
) -> None:
    request = vllm.add(PROMPT, 12, lora_request=lora(adapter))
    while request.num_output < 1:
        vllm.step()
    write(adapter, b"A and C")
    vllm.flush()
    assert request.num_output == 12, "three more blocks"
    assert vllm.seen["blocks saved"] == 5


def test_a_request_that_was_looked_up_before_the_files_changed_is_offered_nothing(
    vllm: Vllm, adapter: Path
) -> None:
    ask(vllm, lora_request=lora(adapter))
    request = vllm.add(PROMPT, 1, lora_request=lora(adapter))
    assert vllm.side.lookup(request, 0) == 5 * BLOCK_TOKENS
    write(adapter, b"A and C")
    assert vllm.side.lookup(request, 0) == 0
    vllm.flush()
    assert loaded(vllm, request) == 0


def picture(name: str, *pixels: float) -> list[Any]:
    place = SimpleNamespace(offset=2, length=9, is_embed=None)
    data = {"pixel_values": SimpleNamespace(data=torch.tensor(pixels))}
    return [SimpleNamespace(modality="image", identifier=name, mm_position=place, data=data)]


class WithPictures(Vllm):
    """The model reckons keys without pictures: it cannot tell whether those kept are right."""

    def audit(self) -> None:
        pass


def test_a_request_under_way_saves_nothing_more_once_its_pictures_name_is_used_again() -> None:
    vllm = WithPictures(None, is_caching=False, num_host=24)
    request = vllm.add(PROMPT, 12, mm_features=picture("chosen", 1.0))
    while request.num_output < 1:
        vllm.step()
    other = vllm.add(PROMPT, 1, mm_features=picture("chosen", 2.0))
    vllm.flush()
    assert request.num_output == 12, "three more blocks"
    assert loaded(vllm, other) == 0
    assert vllm.seen["blocks saved"] == 5, "those from before the name was in doubt"
    vllm.close()


def test_a_picture_is_found_under_another_name_and_another_is_not() -> None:
    vllm = WithPictures(None, is_caching=False, num_host=24)
    ask(vllm, mm_features=picture("renderer0-mm-1-image-0", 1.0))
    keys = []
    for name, pixels in (("renderer0-mm-2-image-0", 1.0), ("renderer0-mm-3-image-0", 2.0)):
        request = vllm.add(PROMPT, 1, mm_features=picture(name, pixels))
        keys.append(vllm.side.lookup(request, 0))
        vllm.side.finished(request)
        del vllm.requests[request.request_id]
        vllm.waiting.remove(request)
    assert keys == [5 * BLOCK_TOKENS, 0]
    vllm.close()
