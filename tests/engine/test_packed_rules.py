"""Windows, sinks and caps over blocks that are packed in HOST: the same bits as over raw ones.

KV in 8 bits is never packed. Triton's interpreter cannot multiply bfloat16: there float16 stands
for it (see `packed_blocks`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.cold_steps import ColdSteps
from engine.packed_blocks import form_of, pack_into, strange_pool
from engine.ruled_models import MODELS, make_model
from engine.test_runner import BLOCK_TOKENS, Sequence, need_interpreter

from penstock.codecs.lossless import LosslessCodec
from penstock.engine.models import load_model
from penstock.engine.runner import TorchRunner
from penstock.stores.device import DevicePool
from penstock.stores.host import HostArena
from penstock.types import BlockSpec, Slot

pytest.importorskip("triton")

from penstock.engine import fetching
from penstock.engine.attention import triton as kernels
from penstock.engine.triton_runner import TritonRunner

SMALL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # no bf16 on this CPU
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_packed_blocks_change_no_bit(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "triton":
        need_interpreter()
    config = copy.deepcopy(MODELS[kind])
    config.update(SMALL)
    make_model(config).save_pretrained(tmp_path)
    dtype = torch.bfloat16 if name == "torch" else torch.float16
    loaded = load_model(str(tmp_path), dtype=str(dtype).removeprefix("torch."))
    assert loaded.windows == (12, 0, 12, 0)
    pool = DevicePool(12, loaded.num_layers, BLOCK_TOKENS, 2, 64, dtype)
    torch.manual_seed(0)
    pool.tensor.copy_(strange_pool(pool.tensor.shape, dtype).nan_to_num(0.5, 1.5, -1.5))
    form = form_of(pool.tensor)
    assert form.row_values == loaded.head_dim  # as attention reads them
    host = HostArena(BlockSpec(bytes(32), form.packed_bytes, BLOCK_TOKENS), 1 << 17)
    runner: Any
    if name == "torch":
        runner = TorchRunner(
            loaded.model, pool, BLOCK_TOKENS, loaded.num_heads, host, host_form=form
        )
    else:
        monkeypatch.setattr(kernels, "PART_TOKENS", 2 * BLOCK_TOKENS)
        monkeypatch.setattr(fetching, "_NUM_PACKED_PROGRAMS", 2)
        monkeypatch.setattr(fetching, "_NUM_UNPACKING", 2)
        runner = TritonRunner(loaded, pool, BLOCK_TOKENS, host, max_num_seqs=2, host_form=form)
    # A prompt's last chunk, first: single tokens write to the last blocks.
    sequence = Sequence([(i * 7 + 3) % 60 + 3 for i in range(37)], [4, 2, 9, 0, 11])
    before = pool.tensor.clone()
    wanted = runner.run([sequence.chunk(34, 37)]).clone()
    codec = LosslessCodec(form)
    for pin, index in enumerate((0, 2, 3)):
        slot = sequence.table.chill(index, Slot(pin))
        pack_into(codec, pool.tensor[slot], host.view(Slot(pin)))
        pool.tensor[slot] = float("nan")
    assert wanted.isfinite().all()
    assert torch.equal(runner.run([sequence.chunk(34, 37)]), wanted)
    pool.tensor.copy_(before)
    ColdSteps(runner, pool, host, [33, 20, 26], 60, seed=1, form=form).run(9)
    assert name == "torch" or runner.num_fetched > runner.num_ahead > 0
