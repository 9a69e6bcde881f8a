"""Media are known by what the encoder is given; a name that anybody may choose is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.connectors.vllm.media import Media, Places


def feature(identifier: str, data: Any, offset: int = 0, mask: Any = None) -> Any:
    place = SimpleNamespace(offset=offset, length=3, is_embed=mask)
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place, data=data)


def elements(**fields: Any) -> dict[str, Any]:
    return {name: SimpleNamespace(data=data) for name, data in fields.items()}


def pixels(*values: float) -> dict[str, Any]:
    return elements(pixel_values=torch.tensor(values))


def names(*features: Any, media: Media | None = None, lora: Any = None) -> Places | None:
    asked = SimpleNamespace(mm_features=list(features), lora_request=lora)
    return (media or Media()).names(asked)


# vLLM counts media from 0 in every process where neither of its caches needs a hash.
def test_a_counter_that_begins_anew_does_not_name_another_picture() -> None:
    counter = "renderer0-mm-1-image-0"
    assert names(feature(counter, pixels(1.0, 2.0))) != names(feature(counter, pixels(3.0, 4.0)))


def test_one_picture_has_one_name_whatever_it_is_called() -> None:
    for identifier in ("renderer0-mm-7-image-0", "chosen", "0f" * 32, "sql:" + "0f" * 32):
        found = names(feature(identifier, pixels(1.0, 2.0)))
        assert found is not None
        assert found == names(feature("0f" * 32, pixels(1.0, 2.0)))


def test_all_that_the_encoder_is_given_counts() -> None:
    mask = torch.tensor([True, False, True])
    given = [
        elements(pixel_values=torch.tensor([1.0, 2.0])),
        elements(pixel_values=torch.tensor([1.0, 3.0])),
        elements(pixel_values=torch.tensor([[1.0, 2.0]])),
        elements(pixel_values=torch.tensor([1.0, 2.0], dtype=torch.bfloat16)),
        elements(pixel_values=torch.tensor([1.0, 2.0], dtype=torch.float64)),
        elements(pixels=torch.tensor([1.0, 2.0])),
        elements(pixel_values=torch.tensor([1.0, 2.0]), grid=torch.tensor([1, 2])),
        elements(pixel_values=torch.tensor([1.0, 2.0]), grid=torch.tensor([2, 1])),
        elements(pixel_values=[torch.tensor([1.0]), torch.tensor([2.0])]),
        elements(pixel_values=[torch.tensor([1.0, 2.0])]),
        elements(pixel_values=torch.empty(0)),
        elements(seconds=1.5),
        elements(seconds="1.5"),
    ]
    found = [names(feature("same", data)) for data in given]
    found.append(names(feature("same", given[0], mask=mask)))
    found.append(names(feature("same", given[0], offset=1)))
    assert None not in found
    assert len({str(each) for each in found}) == len(found)


def test_how_numbers_lie_in_memory_does_not_count() -> None:
    lying = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()
    assert not lying.is_contiguous()
    one = names(feature("a", elements(pixel_values=lying)))
    assert one == names(feature("b", elements(pixel_values=lying.contiguous())))


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        object(),
        elements(address=4096, monotonic_id=3),
        elements(pixel_values=object()),
        elements(pixel_values=torch.empty(2, device="meta")),
        elements(pixel_values=[torch.tensor([1.0]), object()]),
    ],
    ids=["none", "empty", "unknown", "shared memory", "object", "not on the CPU", "within a list"],
)
def test_without_its_numbers_a_medium_has_no_name(data: Any) -> None:
    assert names(feature("0f" * 32, data)) is None
    assert names(feature("another", pixels(1.0)), feature("0f" * 32, data)) is None


def test_a_name_that_stood_for_two_media_is_trusted_no_more() -> None:
    """vLLM keeps the encoder's output under it: which of the two it is, nobody knows."""
    media = Media()
    first, second = feature("chosen", pixels(1.0)), feature("chosen", pixels(2.0))
    running = SimpleNamespace(mm_features=[first], lora_request=None)
    assert media.names(running) is not None
    assert media.are_known(running)
    assert names(second, media=media) is None
    assert not media.are_known(running)
    assert names(first, media=media) is None
    assert names(feature("other", pixels(2.0)), media=media) is not None


def test_a_name_whose_numbers_were_not_at_hand_is_not_trusted_later() -> None:
    media = Media()
    assert names(feature("chosen", None), media=media) is None
    assert names(feature("chosen", pixels(1.0)), media=media) is None


def test_where_others_encode_no_medium_has_a_name() -> None:
    media = Media(has_own_encoder=False)
    assert names(feature("a", pixels(1.0)), media=media) is None
    assert names(media=media) == {}


def test_where_adapters_encode_a_medium_has_a_name_without_one_only() -> None:
    media = Media(adapters_encode=True)
    assert names(feature("a", pixels(1.0)), media=media) is not None
    assert names(feature("a", pixels(1.0)), media=media, lora=object()) is None
    assert names(media=media, lora=object()) == {}


def test_so_many_names_are_remembered_and_not_more() -> None:
    media = Media(most_names=3)
    for number in range(10):
        assert names(feature(str(number), pixels(float(number))), media=media) is not None
    assert names(feature("9", pixels(8.0)), media=media) is None, "one of the last three"
    assert names(feature("0", pixels(1.0)), media=media) is not None, "long forgotten"


def test_with_too_many_names_in_doubt_none_is_trusted() -> None:
    media = Media(most_names=3)
    for number in range(4):
        names(feature(str(number), None), media=media)
    assert names(feature("fresh", pixels(1.0)), media=media) is None
    assert names(media=media) == {}
