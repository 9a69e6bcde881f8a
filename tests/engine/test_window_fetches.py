"""Cold blocks before a layer's window are not fetched for it, and no bit of any logit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.ruled_models import MODELS, WINDOW, make_model
from engine.test_runner import BLOCK_TOKENS, Sequence, need_interpreter

from penstock.engine.models import LoadedModel, load_model
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

pytest.importorskip("triton")

from penstock.engine import fetching
from penstock.engine.attention import triton as kernels
from penstock.engine.triton_runner import TritonRunner

# Four layers: two buffers, and the first layers of the next step are fetched ahead.
SMALL = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
KINDS: dict[str, Any] = {
    "mixed": ("gpt_oss", SMALL | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "all": ("phi3", SMALL),
}
TOKENS = [[(i * step + 3) % 60 + 3 for i in range(70)] for step in (7, 11)]
BOTH = [0, 1]
# Positions, and whose tokens there are computed: one after the other, further on, and back.
STEPS = [(41, BOTH), (42, BOTH), (43, BOTH), (44, BOTH), (52, BOTH), (59, [1]), (42, BOTH)]


class Fetched:
    """Counts the blocks that are fetched for each layer, by what is written to the buffers.

    What is not fetched becomes NaN there: whoever reads it, computes NaN.
    """

    def __init__(self, layer_bytes: int) -> None:
        self._layer_bytes = layer_bytes
        self._fetch_layer = kernels.fetch_layer
        self.num_blocks: dict[int, int] = {}

    def __call__(
        self, sources: Any, waves: Any, wave: int, offset: int, out: Any, *args: Any, **which: bool
    ) -> None:
        num_there = int(waves[6 * wave + 2]) if which["is_first"] else 0
        out[num_there:] = float("nan")
        self._fetch_layer(sources, waves, wave, offset, out, *args, **which)
        layer = offset // self._layer_bytes
        num_new = int((~out[num_there:].isnan().flatten(1).all(1)).sum())
        self.num_blocks[layer] = self.num_blocks.get(layer, 0) + num_new


class Rig:
    """A model, a pool, and two sequences in it."""

    def __init__(self, loaded: LoadedModel) -> None:
        shape = (loaded.num_layers, BLOCK_TOKENS, loaded.num_kv_heads, loaded.head_dim)
        self.pool = DevicePool(20, *shape, torch.float32)
        self.pool.tensor.normal_(generator=torch.Generator().manual_seed(1))
        self.host = HostArena(BlockSpec(bytes(32), self.pool.block_bytes, BLOCK_TOKENS), 1 << 21)
        self.runner = TritonRunner(loaded, self.pool, BLOCK_TOKENS, self.host, max_num_seqs=2)
        self.layer_bytes = self.pool.block_bytes // loaded.num_layers
        blocks = [[5, 3, 9, 1, 0, 2, 4, 6, 7], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
        self.sequences = [Sequence(TOKENS[n], each) for n, each in enumerate(blocks)]

    def chill(self, sequence: Sequence, *indices: int, first_pin: int = 0) -> None:
        for pin, index in enumerate(indices, first_pin):
            slot = sequence.table.chill(index, Slot(pin))
            self.host.view(Slot(pin))[: self.pool.block_bytes] = bytes(self.pool.view(slot))
            self.pool.tensor[slot] = float("nan")

    def step(self, position: int, which: list[int]) -> torch.Tensor:
        """Compute the tokens at `position` of some sequences."""
        chunks = []
        for number in which:
            each = self.sequences[number]
            each.tokens = TOKENS[number][: position + 1]
            chunks.append(each.chunk(position, position + 1))
        return self.runner.run(chunks).clone()


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    need_interpreter()
    name, changes = KINDS[request.param]
    make_model(type(MODELS[name])(**MODELS[name].to_dict() | changes)).save_pretrained(tmp_path)
    found = load_model(str(tmp_path), dtype="float32")
    assert [bool(window) for window in found.windows] == [True, request.param == "all"] * 2
    return found


@pytest.mark.parametrize("room_blocks", [2, 100])
def test_layers_fetch_what_their_window_reaches(
    loaded: LoadedModel, room_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
    monkeypatch.setattr(fetching, "_NUM_PROGRAMS", 2)
    resident = Rig(loaded)
    wanted = [resident.step(*step) for step in STEPS]
    monkeypatch.setattr(fetching, "_BUFFER_BYTES", room_blocks * resident.layer_bytes)
    rig = Rig(loaded)
    fetched = Fetched(rig.layer_bytes)
    monkeypatch.setattr(kernels, "fetch_layer", fetched)
    one, two = rig.sequences
    rig.chill(one, 0, 2, 3, 4)
    rig.chill(two, 1, 4, first_pin=8)
    seen: set[int] = set()
    for number, (step, logits) in enumerate(zip(STEPS, wanted, strict=True)):
        fetched.num_blocks = {}
        assert torch.equal(rig.step(*step), logits), step
        position, which = step
        cold = [index for n in which for index in rig.sequences[n].table.cold()]
        near = [index for index in cold if (index + 1) * BLOCK_TOKENS > position + 1 - WINDOW]
        whole = near if all(loaded.windows) else cold
        # The other layers are fetched before their step, and again if the steps change.
        assert [fetched.num_blocks.get(layer, 0) for layer in (2, 3)] == [len(near), len(whole)]
        seen |= {len(near), len(whole)}
        if number == 2:
            rig.chill(one, 1, first_pin=20)
    assert seen >= {0, 2, 3}
    assert 7 in seen or all(loaded.windows)
    assert all(loaded.windows) or rig.runner.num_ahead > 0
