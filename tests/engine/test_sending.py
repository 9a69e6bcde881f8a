"""Small tensors reach the device as they are, and their pinned memory is kept until it was read."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from penstock.engine import sending
from penstock.engine.attention import triton as kernels
from penstock.engine.sending import pulled, sent

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Event:
    """Of a GPU that is only imagined."""

    def __init__(self) -> None:
        self.is_done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done


@pytest.fixture(autouse=True)
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    sending._held.clear()
    if DEVICE.type == "cpu":
        monkeypatch.setattr(sending, "_cuda", type("Cuda", (), {"Event": Event}))


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[1.5, 2.0**60, 1 - 2**-53]] * 3, dtype=torch.float64),
        torch.tensor([0.25, -1.0, 3.0]),
        torch.arange(1000),
        torch.arange(257) % 3 == 0,
        torch.arange(12).view(3, 4).t(),
    ],
    ids=["float64", "float32", "int64", "bool", "strided"],
)
def test_they_arrive_as_they_are(values: torch.Tensor) -> None:
    found = pulled(values, DEVICE)
    assert (found.dtype, found.shape, found.device.type) == (
        values.dtype,
        values.shape,
        DEVICE.type,
    )
    assert torch.equal(found.cpu(), values)


def test_nothing_is_sent_as_nothing() -> None:
    like = torch.zeros(1, device=DEVICE)
    assert sent(torch.zeros(0, dtype=torch.int64), like).shape == (0,)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU reads at once")
def test_memory_is_kept_until_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads an address. Torch does not know, and would give the memory to others."""
    late: list[tuple[int, torch.Tensor]] = []
    monkeypatch.setattr(kernels, "pull_words", lambda *call: late.append(call))
    found = [pulled(torch.tensor([number, ~number]), DEVICE) for number in range(20)]
    assert [staged.data_ptr() for _, staged in sending._held] == [at for at, _ in late]
    monkeypatch.undo()
    for at, words in late:
        kernels.pull_words(at, words)
    assert [each.tolist() for each in found] == [[number, ~number] for number in range(20)]
    for done, _ in list(sending._held)[:19]:
        done.is_done = True
    monkeypatch.setattr(sending, "_cuda", type("Cuda", (), {"Event": Event}))
    pulled(torch.tensor([1]), DEVICE)
    assert len(sending._held) == 2
