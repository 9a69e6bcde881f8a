"""The GPU's kernels, in Triton's interpreter: the same bytes as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from penstock.codecs import lossless_triton
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat

FORMS = [
    LosslessFormat(128, 16, 2),
    LosslessFormat(64, 48, 3),
    LosslessFormat(96, 12, 2),
    LosslessFormat(128, 40, 1),
]


def _pool(form: LosslessFormat, num_blocks: int, share_of_wild: float) -> torch.Tensor:
    values = torch.randn(num_blocks, form.raw_bytes // 2)
    values *= torch.exp(torch.randn(form.row_values)).repeat(values.shape[1] // form.row_values)
    bits = values.to(torch.bfloat16).view(torch.int16)
    is_wild = torch.rand(bits.shape) < share_of_wild
    wild = torch.randint(-32768, 32767, bits.shape, dtype=torch.int16)
    # Small ones are exceptions. A large one makes all others of its row exceptions.
    wild = torch.where(torch.rand(bits.shape) < 0.01, wild, wild & ~0x6000)
    return torch.where(is_wild, wild, bits)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.version)
@pytest.mark.parametrize("share_of_wild", [0.0, 0.001, 0.1])
def test_the_same_bytes_as_on_a_cpu(form: LosslessFormat, share_of_wild: float) -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pool = _pool(form, 5, share_of_wild).to(device)
    size = form.region_values * 2
    addresses = torch.arange(form.num_regions, dtype=torch.int64) * size + pool.data_ptr()
    addresses = addresses.to(device)
    strides = torch.full_like(addresses, form.raw_bytes)
    blocks = torch.tensor([3, 0, 4], dtype=torch.int64, device=device)
    buffer = torch.full((3, form.packed_bytes + 32), 7, dtype=torch.uint8, device=device)
    buffer[:, 16 : 16 + form.header_bytes] = 0  # a stage's header is zero from the beginning
    lossless_triton.pack_blocks(form, addresses, strides, blocks, buffer, 16)

    codec = LosslessCodec(form)
    for row, block in enumerate(blocks.tolist()):
        wanted = bytearray(form.packed_bytes)
        raw = pool[block].cpu().numpy().view(np.uint8).tobytes()
        fits = codec.pack(memoryview(bytearray(raw)), memoryview(wanted))
        found = buffer[row].cpu().numpy()
        assert found[16 : 16 + form.packed_bytes].tobytes() == wanted
        assert set(found[:16]) == set(found[16 + form.packed_bytes :]) == {7}
        counts = found[16 : 16 + 2 * form.num_regions].view(np.uint16)
        assert fits == bool((counts <= form.max_exceptions).all())
        assert fits or share_of_wild == 0.1

    if share_of_wild < 0.1:
        before = pool.clone()
        pool[blocks] = -1
        lossless_triton.unpack_blocks(form, addresses, strides, blocks, buffer, 16)
        assert torch.equal(pool, before)
