"""Turns keys to other positions: rotary embeddings rotate pairs of values by angle x position.

A key at position p, turned by n positions, is the key at position p + n. Which values form pairs,
and by which angles they rotate, is found by running the model itself on single tokens: a token
without a context has the same keys at all positions, except for their rotation. So every kind of
rotary embedding is either reproduced, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine import fp8
from penstock.engine.anywhere.placing import Placing
from penstock.engine.attention.torch import AttentionStep, SequenceSpan
from penstock.engine.models import LoadedModel
from penstock.errors import ConfigError

_FROM = 3  # the position whose keys are turned
_PROBES = range(1, 9)  # tokens that are tried, one after the other
_MAX_ERROR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of a pair's length
_ANGLE_ERROR = 2.0**-23  # for each position: models compute angles in float32
_TOKENS_AT_ONCE = 512  # turned keys are float32: they take several times the memory of the KV


class _Rotation:
    """One way to rotate the first values of a head."""

    def __init__(self, frequencies: Tensor, *, is_interleaved: bool) -> None:
        self._frequencies = frequencies.double().cpu()
        self.is_interleaved = is_interleaved

    @property
    def num_pairs(self) -> int:
        return len(self._frequencies)

    def angles(self, turn: int) -> Tensor:
        """Cosines and sines of a turn, [2, pairs], in float32."""
        angles = self._frequencies * turn
        return torch.stack((angles.cos(), angles.sin())).float()

    def __call__(self, keys: Tensor, turn: int) -> Tensor:
        """Keys [..., head_dim] in float32."""
        size = 2 * self.num_pairs
        cosines, sines = self.angles(turn).to(keys.device)
        turned, rest = keys[..., :size], keys[..., size:]
        if self.is_interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, -1)
        pairs = (first * cosines - second * sines, second * cosines + first * sines)
        if self.is_interleaved:
            return torch.cat((torch.stack(pairs, -1).flatten(-2), rest), -1)
        return torch.cat((*pairs, rest), -1)

    def lengths(self, keys: Tensor) -> Tensor:
        """For each value, the length of the pair that it belongs to. No rotation changes it."""
        size = 2 * self.num_pairs
        turned, rest = keys[..., :size], keys[..., size:].abs()
        if self.is_interleaved:
            pairs = torch.hypot(turned[..., 0::2], turned[..., 1::2]).repeat_interleave(2, -1)
        else:
            pairs = torch.hypot(*turned.chunk(2, -1)).tile(2)
        return torch.cat((pairs, rest), -1)


class Turner:
    """Places KV in a pool, [blocks, layers, 2, block_tokens, kv_heads, head_dim]."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Raises ConfigError if the model's keys cannot be turned."""
        last = loaded.max_tokens - 1
        turns = sorted({1, min(37, last - _FROM), last - _FROM})
        token = _telling_token(loaded)
        before, *after = _keys_at(loaded, [_FROM, *(_FROM + turn for turn in turns)], token)
        candidates = [None, *_candidates(loaded.model, loaded.head_dim)]
        # Of each layer; None if it has no positions.
        self._rotations: list[_Rotation | None] = [
            _choose(
                *(candidates, layer, before[layer], [keys[layer] for keys in after], turns),
                loaded.dtype,
            )
            for layer in range(loaded.num_layers)
        ]

    def turn(self, keys: Tensor, layer: int, turn: int) -> Tensor:
        """Keys [..., kv_heads, head_dim], turned by `turn` positions in float32."""
        rotation = self._rotations[layer]
        return rotation(keys.float(), turn) if turn and rotation is not None else keys.float()

    @torch.inference_mode()
    def place(self, pool: Tensor, placings: Sequence[Placing]) -> None:
        for placing in placings:
            if pool.is_cuda and pool.dtype is not fp8.DTYPE and self._suits_kernel:
                self.place_by_kernel(pool, placing)
            else:
                self.place_by_torch(pool, placing)

    @property
    def _suits_kernel(self) -> bool:
        """Whether all layers rotate the same values."""
        found = [each for each in self._rotations if each is not None]
        return len({(each.is_interleaved, each.num_pairs) for each in found}) == 1

    def place_by_kernel(self, pool: Tensor, placing: Placing) -> None:
        from penstock.engine.anywhere.placing_triton import place_tokens

        different = list(dict.fromkeys(each for each in self._rotations if each is not None))
        numbers = [-1 if each is None else different.index(each) for each in self._rotations]
        if not placing.turn:  # to the bit, whatever the numbers are
            numbers = [-1] * len(numbers)
        angles = torch.stack([each.angles(placing.turn) for each in different])
        place_tokens(
            pool,
            _index(placing.source_slots, placing.source_offsets, pool),
            _index(placing.slots, placing.offsets, pool),
            torch.tensor(numbers).to(pool.device),
            angles.to(pool.device),
            is_interleaved=different[0].is_interleaved,
        )

    def place_by_torch(self, pool: Tensor, placing: Placing) -> None:
        rounds = pool.dtype is fp8.DTYPE
        # Torch cannot index e4m3 on all devices, but it can index bytes.
        values = pool.view(torch.uint8) if rounds else pool
        for start in range(0, len(placing.slots), _TOKENS_AT_ONCE):
            part = slice(start, start + _TOKENS_AT_ONCE)
            source = _index(placing.source_slots[part], placing.source_offsets[part], pool)
            target = _index(placing.slots[part], placing.offsets[part], pool)
            for layer in range(pool.shape[1]):
                mine = values[:, layer]
                mine[target[0], 1, target[1]] = mine[source[0], 1, source[1]]
                keys = mine[source[0], 0, source[1]]
                if placing.turn:
                    plain = keys.view(fp8.DTYPE) if rounds else keys
                    turned = self.turn(plain, layer, placing.turn)
                    keys = fp8.narrow(turned) if rounds else turned.to(keys.dtype)
                mine[target[0], 0, target[1]] = keys


class _Captured:
    """Takes the keys of a step instead of storing them (see `attention.torch.KvMemory`)."""

    rounds = False
    block_tokens = 1

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.keys.append(keys.float())

    def history(self, layer: int, blocks: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("a single token has no history")


def _telling_token(loaded: LoadedModel) -> int:
    """A token that has keys. Those of a token without an embedding, such as one that only pads,
    are all zero, which every rotation leaves as they are."""
    for token in _PROBES[: loaded.vocab_size - 1]:
        (keys,) = _keys_at(loaded, [_FROM], token)
        if all(bool(layer.any()) for layer in keys):
            return token
    raise ConfigError(
        f"the keys of the model's tokens {_PROBES.start} to {_PROBES.stop - 1} are all zero, so it "
        "is not known how they turn to other positions, and segments cannot be reused anywhere. "
        "Send the prompt without segments."
    )


@torch.inference_mode()
def _keys_at(
    loaded: LoadedModel, positions: Sequence[int], token: int = _PROBES.start
) -> list[list[Tensor]]:
    """The keys of one token, alone at each of these positions, in each layer."""
    captured = _Captured()
    # One after the other, so that all are computed alike, to the bit.
    found = []
    for position in positions:
        captured.keys = []
        loaded.model(
            input_ids=torch.tensor([[token]], device=loaded.device),
            position_ids=torch.tensor([[position]], device=loaded.device),
            use_cache=False,
            logits_to_keep=1,
            penstock=AttentionStep(captured, [SequenceSpan(0, 1, 0, None)]),
        )
        found.append(captured.keys)
    return found


def _candidates(model: Any, head_dim: int) -> Iterator[_Rotation]:
    for name, frequencies in model.named_buffers():
        # Models with two rotations name them: sliding_attention_inv_freq.
        if name.endswith("inv_freq") and 0 < 2 * frequencies.numel() <= head_dim:
            for is_interleaved in (False, True):
                yield _Rotation(frequencies.flatten(), is_interleaved=is_interleaved)


def _turned(rotation: _Rotation | None, keys: Tensor, turn: int) -> Tensor:
    return keys if rotation is None else rotation(keys, turn)


def _choose(
    candidates: Sequence[_Rotation | None],
    layer: int,
    before: Tensor,
    after: Sequence[Tensor],
    turns: Sequence[int],
    dtype: torch.dtype,
) -> _Rotation | None:
    """The first rotation that gives the keys which the model computes.

    Each value is compared with its own pair: some models have a few keys that are far larger than
    all others and hardly rotate, and beside them the others would not count.
    """
    for rotation in candidates:
        lengths = before.abs() if rotation is None else rotation.lengths(before)
        lengths = lengths.clamp(min=torch.finfo(dtype).tiny)
        limits = [_MAX_ERROR[dtype] + (_FROM + turn) * _ANGLE_ERROR for turn in turns]
        if all(
            bool(((_turned(rotation, before, turn) - keys).abs() <= limit * lengths).all())
            for turn, keys, limit in zip(turns, after, limits, strict=True)
        ):
            return rotation
    raise ConfigError(
        f"the keys of layer {layer} cannot be turned to other positions: the model's position "
        "embeddings are not plain rotary ones, so segments cannot be reused anywhere. Send the "
        "prompt without segments."
    )


def _index(
    slots: NDArray[np.int64], offsets: NDArray[np.int64], pool: Tensor
) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(np.stack((slots, offsets))).to(pool.device)
    return both[0], both[1]
