"""A faster forward pass for common decoders, on the weights that transformers has loaded.

Llama, Mistral, Qwen2 and Qwen3 are the same decoder: norm, attention with rotary positions, norm,
gated MLP. For these, projections that read the same input become one matrix product, and the work
between products takes few kernels (see `elementwise`). All other models, and unusual variants of
these, use transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import embedding, linear

from penstock.engine import elementwise, fp8

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")  # their angles depend only on the position

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [rows, heads, dim], key, value [rows, kv_heads, dim]) to [rows, heads * dim]."""


def can_fuse(model: Any) -> bool:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _KINDS
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _ROPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and all(map(_is_plain, model.model.layers))
    )


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    modules = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    modules += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    # Quantized or adapted layers have another type.
    return all(type(module) is Linear for module in modules)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv, self.qkv_bias = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.up, self.up_bias = _join(mlp.gate_proj, mlp.up_proj)
        self.out = attention.o_proj
        self.down = mlp.down_proj
        self.first_norm = layer.input_layernorm
        self.second_norm = layer.post_attention_layernorm
        self.norms: tuple[Tensor, Tensor] | None = None
        self.epsilon = 0.0
        if hasattr(attention, "q_norm"):  # Qwen3 has norms per head
            self.norms = (attention.q_norm.weight, attention.k_norm.weight)
            self.epsilon = attention.q_norm.variance_epsilon


class FusedDecoder:
    """Takes over a model's weights: its projections become views of the joined matrices."""

    def __init__(
        self, model: Any, max_tokens: int, block_tokens: int, kv_dtype: torch.dtype
    ) -> None:
        self._model = model
        config = model.config
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._block_tokens = block_tokens
        self.scale: float = model.model.layers[0].self_attn.scaling
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._layer_bytes = 2 * block_tokens * self._kv_heads * self._dim
        self._layer_bytes *= kv_dtype.itemsize
        self._is_fp8 = kv_dtype is fp8.DTYPE
        self._rotary = _angles(model.model.rotary_emb, max_tokens, self._layers[0].qkv)

    def forward(
        self, ids: Tensor, positions: Tensor, addresses: Tensor, kept: Tensor, attend: Attend
    ) -> Tensor:
        """The logits of the rows `kept`. Also writes keys and values to their addresses."""
        inner = self._model.model
        x = embedding(ids, inner.embed_tokens.weight)
        residual: Tensor | None = None
        num_rows = len(ids)
        queries, pairs = self._heads * self._dim, self._kv_heads * self._dim
        for number, layer in enumerate(self._layers):
            norm = layer.first_norm
            h, residual = elementwise.add_norm(x, residual, norm.weight, norm.variance_epsilon)
            qkv = linear(h, layer.qkv, layer.qkv_bias)
            elementwise.rotate_and_store(
                qkv,
                self._rotary,
                positions,
                addresses,
                layer.norms,
                number * self._layer_bytes,
                layer.epsilon,
                self._heads,
                self._kv_heads,
                self._dim,
                self._block_tokens,
                is_fp8=self._is_fp8,
            )
            q, k, v = torch.split(qkv, [queries, pairs, pairs], dim=1)
            attended = attend(
                number,
                q.view(num_rows, self._heads, self._dim),
                k.view(num_rows, self._kv_heads, self._dim),
                v.view(num_rows, self._kv_heads, self._dim),
            )
            x = layer.out(attended)
            norm = layer.second_norm
            h, residual = elementwise.add_norm(x, residual, norm.weight, norm.variance_epsilon)
            x = layer.down(elementwise.gate(linear(h, layer.up, layer.up_bias)))
        assert residual is not None
        norm = inner.norm
        h, _ = elementwise.add_norm(x[kept], residual[kept], norm.weight, norm.variance_epsilon)
        logits: Tensor = self._model.lm_head(h)
        return logits


def _join(*projections: Linear) -> tuple[Tensor, Tensor | None]:
    """Join projections of the same input into one matrix. Each becomes a view of it."""
    weight = torch.cat([projection.weight.data for projection in projections])
    bias = None
    if projections[0].bias is not None:
        bias = torch.cat([projection.bias.data for projection in projections])
    start = 0
    for projection in projections:
        end = start + projection.out_features
        projection.weight.data = weight[start:end]
        if bias is not None:
            projection.bias.data = bias[start:end]
        start = end
    return weight, bias


def _angles(rotary: Any, max_tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, [positions, dim / 2], in float32."""
    sample = torch.empty(0, dtype=torch.float32, device=like.device)
    positions = torch.arange(max_tokens, device=like.device)[None]
    cosines, sines = rotary(sample, position_ids=positions)
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
