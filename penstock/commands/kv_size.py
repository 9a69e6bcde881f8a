"""`penstock kv-size`: the size of a model's KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.codecs.names import RAW
from penstock.commands import JsonFlag, print_fields, print_json
from penstock.commands.group_rows import describe_group, group_rows
from penstock.errors import ConfigError
from penstock.shapes.embedded import embedded_bytes_per_token, embedded_words
from penstock.shapes.packing import pack_shape
from penstock.shapes.sizing import (
    PRESETS,
    ModelShape,
    find_shape,
    shape_from_config,
    suggest_block_tokens,
)
from penstock.types import PAGE_BYTES, round_up
from penstock.units import GiB, counted, format_bytes

EXAMPLE = (
    "Example: penstock kv-size llama-3.1-8b --tokens 8192 --batch 16\n\n"
    "Example: penstock kv-size llama-3.1-8b --codec lossless\n\n"
    "Example: penstock kv-size --layers 32 --kv-heads 8 --head-dim 128"
)
# Larger than any real value, and small enough that no product overflows a float.
_MAX_COUNT = 1 << 40


def kv_size(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A known model (see `penstock plan --list`), a config.json, or its folder.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Number of layers, instead of MODEL.")
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="KV heads; with grouped queries, fewer than attention heads."
        ),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Elements per head.")] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Bits per KV element: 4, 8, 16 or 32. Default: the model's, or 16.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per sequence.")] = 1,
    batch: Annotated[int, typer.Option(metavar="N", help="Number of sequences.")] = 1,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also show the size packed in DRAM and below: auto, raw, lossless, or lossy "
            "(fp8, int8, int4).",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """The size of a model's KV, and a suitable block size.

    KV bytes = 2 x layers x kv_heads x head_dim x bits/8 x tokens x batch

    Layers with a window count at most the window, as in vLLM; states count once per sequence. If
    the embedded engine (`penstock serve`) keeps more, that is shown too.
    """
    counts = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    check_counts({**counts, "--tokens": tokens, "--batch": batch})
    shape = _shape(model, layers, kv_heads, head_dim, bits)
    block_tokens = suggest_block_tokens(shape.bytes_per_token)
    sizes = {
        "kv_bytes_per_token": shape.bytes_per_token,
        "kv_bytes_per_sequence": shape.kv_bytes(tokens),
        "kv_bytes_total": shape.kv_bytes(tokens, batch),
        "block_tokens": block_tokens,
        "block_bytes": block_tokens * shape.bytes_per_token,
        "growing_bytes_per_token": shape.full_bytes_per_token,
        "checkpoint_bytes": shape.checkpoint_bytes(),
        "offloaded_bytes_per_sequence": shape.offloaded_bytes(tokens),
    }
    embedded = embedded_bytes_per_token(shape)
    packed = None if codec is None else _packed(shape, codec, block_tokens)
    if as_json:
        facts = {
            "model": model,
            "num_layers": shape.num_layers,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "latent_dim": shape.latent_dim,
            "window_tokens": shape.window_tokens,
            "num_window_layers": shape.num_window_layers,
            "bits": shape.bits,
            "tokens": tokens,
            "batch": batch,
            "groups": group_rows(shape, tokens),
            "embedded_bytes_per_token": embedded,
            "embedded_bytes_per_sequence": None if embedded is None else embedded * tokens,
        }
        print_json(facts | sizes | ({} if packed is None else {"packed": packed}))
        return
    print_fields(
        f"KV of {model or 'this shape'}",
        [
            ("shape", _describe(shape)),
            *_group_fields(shape),
            ("per token", _exact(sizes["kv_bytes_per_token"])),
            *_partial_fields(shape),
            (f"sequence of {counted(tokens, 'token')}", _exact(sizes["kv_bytes_per_sequence"])),
            (f"batch of {batch:,}", _exact(sizes["kv_bytes_total"])),
            *_embedded_fields(shape, embedded, tokens),
            (
                "suggested block",
                f"{counted(block_tokens, 'token')}, {_exact(sizes['block_bytes'])}",
            ),
            *([] if packed is None else _packed_fields(packed, block_tokens)),
        ],
    )


def check_counts(counts: Mapping[str, int | None]) -> None:
    for name, count in counts.items():
        if count is not None and not 1 <= count <= _MAX_COUNT:
            raise ConfigError(f"{name} is {count}: expected a whole number from 1 to 2^40")


def _shape(
    model: str | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    bits: int | None,
) -> ModelShape:
    given = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    either = "expected a model, or --layers, --kv-heads and --head-dim instead"
    if model is not None:
        if extra := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"both {model} and {', '.join(extra)} are given: {either}")
        return _model_shape(model, bits)
    if layers is None or kv_heads is None or head_dim is None:
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            raise ConfigError(f"no model is given: {either}")
        raise ConfigError(f"{', '.join(missing)} is missing: {either}")
    return ModelShape(layers, kv_heads, head_dim, 16 if bits is None else bits)


def _model_shape(model: str, bits: int | None) -> ModelShape:
    if bits is None:
        return find_shape(model)
    if model.strip().lower() not in PRESETS and Path(model).exists():
        # Not find_shape: it refuses an unknown dtype, which does not matter if bits are given.
        return shape_from_config(Path(model), bits)
    return replace(find_shape(model), bits=bits)


def _packed(shape: ModelShape, codec: str, block_tokens: int) -> dict[str, Any]:
    """The size below the GPU, in the layers that keep every token. Raises ConfigError."""
    packing = pack_shape(shape, codec, block_tokens, setting="--codec")
    growing = shape.full_bytes_per_token or shape.bytes_per_token
    raw_bytes = block_tokens * growing
    slot_bytes = packing.slot_bytes(raw_bytes)
    raw_slot_bytes = round_up(raw_bytes, PAGE_BYTES)
    return {
        "codec": packing.codec,
        "is_lossy": packing.is_lossy,
        "why": packing.why,
        "ratio": packing.ratio,
        "bytes_per_token": packing.packed_bytes(raw_bytes) / block_tokens,
        "block_bytes": packing.packed_bytes(raw_bytes),
        "slot_bytes": slot_bytes,
        "blocks_per_gib": GiB // slot_bytes,
        "tokens_per_gib": GiB // slot_bytes * block_tokens,
        "raw_blocks_per_gib": GiB // raw_slot_bytes,
        "raw_tokens_per_gib": GiB // raw_slot_bytes * block_tokens,
    }


def _packed_fields(packed: dict[str, Any], block_tokens: int) -> list[tuple[str, str]]:
    codec = packed["codec"]

    def held(prefix: str) -> str:
        blocks, tokens = packed[f"{prefix}blocks_per_gib"], packed[f"{prefix}tokens_per_gib"]
        return f"{counted(tokens, 'token')}, {counted(blocks, 'block')}"

    rows = [("codec", f"{codec}: {packed['why']}")]
    if codec != RAW:
        rows += [
            (
                "per token, packed",
                f"{format_bytes(packed['bytes_per_token'])}, {packed['ratio']:.3f} of its size",
            ),
            (
                "block, packed",
                f"{counted(block_tokens, 'token')}, {_exact(packed['block_bytes'])}",
            ),
            ("a GiB holds, packed", held("")),
        ]
    return [*rows, ("a GiB holds, raw", held("raw_"))]


def _group_fields(shape: ModelShape) -> list[tuple[str, str]]:
    if len(shape.groups) == 1 and not shape.partial_groups and not shape.groups[0].fixed_bytes:
        return []  # the shape says it all
    return [(f"group {number}", describe_group(shape, g)) for number, g in enumerate(shape.groups)]


def _partial_fields(shape: ModelShape) -> list[tuple[str, str]]:
    if not shape.partial_groups:
        return []
    return [
        ("of that, grows without limit", _exact(shape.full_bytes_per_token)),
        ("checkpoint of windows and states", _exact(shape.checkpoint_bytes())),
    ]


def _embedded_fields(
    shape: ModelShape, per_token: int | None, tokens: int
) -> list[tuple[str, str]]:
    """What `penstock serve` keeps, if that is not the same."""
    if per_token is None:
        return [("sequence in penstock serve", "not supported: it refuses these layers")]
    if not (words := embedded_words(shape)):
        return []
    return [("sequence in penstock serve", f"{_exact(per_token * tokens)}: {words}")]


def _describe(shape: ModelShape) -> str:
    if shape.num_layers != shape.num_full_layers + shape.num_window_layers:
        return f"{counted(shape.num_layers, 'layer')} of several kinds, {shape.bits}-bit KV"
    if shape.latent_dim is not None:
        return (
            f"{shape.num_layers} layers x {shape.latent_dim} x {shape.bits} bits; "
            "one compressed vector instead of keys and values (MLA)"
        )
    grouped = shape.num_heads is not None and shape.num_heads > shape.num_kv_heads
    text = (
        f"K and V x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} "
        f"x {shape.bits} bits{f'; {shape.num_heads} heads share them' if grouped else ''}"
    )
    if shape.window_tokens is None:
        return text
    return (
        f"{text}; {counted(shape.num_window_layers, 'layer')} with a window of "
        f"{shape.window_tokens:,} tokens"
    )


def _exact(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    return f"{format_bytes(num_bytes)} ({num_bytes:,} bytes)"
