"""A model of Llama-3.1-8B's shapes with random weights, on a GPU, for benchmarks.

A small one of the same kind for a CPU shows that a benchmark works; its figures mean nothing.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness import seconds_of
from benchmarks.vllm_hits import LLAMA
from penstock.engine.attention.torch import NAME, register
from penstock.engine.models import LoadedModel
from penstock.engine.scheduler import Chunk
from penstock.engine.table import BlockTable

BLOCK_TOKENS = 16


def random_llama(device: str = "cuda", **changes: Any) -> LoadedModel:
    """The weights are small random numbers: speed does not depend on them."""
    given = {k: v for k, v in LLAMA.items() if k not in ("architectures", "torch_dtype")}
    config = LlamaConfig(**{**given, **changes})
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device=device).eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    # Buffers hold no weights, and `to_empty` left them undefined.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    register()
    model.config._attn_implementation = NAME
    words = {f"w{i}": i for i in range(100)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return LoadedModel(
        model=model,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0"),
        name="random-llama",
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_tokens=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset(),
        dtype=torch.bfloat16,
        weights_fingerprint="random",
        rope="",
        device=device,
    )


def tiny_llama() -> LoadedModel:
    return _in_float32(
        "cpu",
        num_hidden_layers=3,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=16384,
    )


def small_llama() -> LoadedModel:
    """A small float32 model for a GPU: its answers do not depend on rounding within a batch."""
    return _in_float32(
        "cuda",
        num_hidden_layers=6,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )


def _in_float32(device: str, **shape: Any) -> LoadedModel:
    loaded = random_llama(device, vocab_size=100, bos_token_id=None, eos_token_id=None, **shape)
    loaded.model.float()
    return replace(loaded, dtype=torch.float32)


def link_bytes_per_second() -> float:
    """The link's rate: that of one large pinned copy to the GPU."""
    cuda: Any = torch.cuda
    size = 1 << 30
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")

    def work() -> None:
        on_gpu.copy_(pinned, non_blocking=True)
        cuda.synchronize()

    work()
    return size / min(seconds_of(work) for _ in range(5))


def token_bytes(loaded: LoadedModel) -> int:
    return 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * loaded.dtype.itemsize


@dataclass
class Sequence:
    """The part of a request that a runner uses."""

    tokens: list[int]
    places: InitVar[list[int]]  # a device slot, or ~slot for a slot of HOST
    table: BlockTable = field(init=False)
    is_fill: bool = False

    def __post_init__(self, places: list[int]) -> None:
        self.table = BlockTable()
        self.table.extend_places(places)

    def last(self) -> Chunk:
        """The chunk of its last token, as in a decode step."""
        return Chunk(cast(Any, self), len(self.tokens) - 1, 1)
