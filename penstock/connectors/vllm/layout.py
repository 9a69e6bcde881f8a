"""Reads and checks the memory layout of vLLM's caches, and describes it for the namespace.

Whatever shape an attention backend gives its cache, a block must be one dense stretch of bytes in
each layer. These bytes are saved and restored unchanged. Their description is part of the
namespace, so that KV with another shape, order or packing is never mixed with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.transfer.paged import PagedMemory, PageStretch


class Cache(NamedTuple):
    """One layer's tensor, as plain numbers. Strides are in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> Cache:
        return cls(
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."),
        )


def read_layout(
    caches: Mapping[str, Cache], num_blocks: int, page_bytes: int
) -> tuple[PagedMemory, str]:
    """The memory of every block, and its layout in words. Raises ConfigError if it is unknown.

    `page_bytes` is the size of a block in one layer according to vLLM.
    """
    stretches: list[PageStretch] = []
    shapes: list[str] = []
    seen: set[int] = set()
    for name, cache in caches.items():
        if cache.address in seen:
            continue  # layers that share one cache
        seen.add(cache.address)
        stretch, shape = _read(name, cache, num_blocks)
        if stretch.num_bytes != page_bytes:
            raise _unknown(
                name, cache, f"a block has {stretch.num_bytes} bytes, but vLLM says {page_bytes}"
            )
        stretches.append(stretch)
        shapes.append(shape)
    if not stretches:
        raise ConfigError("vLLM registered no KV cache to offload. Start vLLM without Penstock.")
    words = f"{len(stretches)} layers of {shapes[0]}"
    if len(set(shapes)) > 1:
        words = " | ".join(shapes)
    return PagedMemory(tuple(stretches), num_blocks).merged(), words


def _read(name: str, cache: Cache, num_blocks: int) -> tuple[PageStretch, str]:
    rows = cache.shape[0] if cache.shape else 0
    if rows == 0 or rows % num_blocks:
        raise _unknown(
            name,
            cache,
            f"the first dimension is not a multiple of {num_blocks}, the number of blocks",
        )
    per_block = rows // num_blocks  # kernels may divide a block into smaller ones
    shape, strides = cache.shape[1:], cache.strides[1:]
    num_elements = _dense_elements(shape, strides)
    if num_elements is None or cache.strides[0] < num_elements:
        raise _unknown(name, cache, "a block's bytes have gaps, or blocks overlap")
    if per_block > 1 and cache.strides[0] != num_elements:
        raise _unknown(name, cache, "the parts of a block are not adjacent")
    stretch = PageStretch(
        cache.address,
        cache.strides[0] * per_block * cache.element_bytes,
        num_elements * per_block * cache.element_bytes,
    )
    return stretch, f"{per_block}x{list(shape)} strides {list(strides)} {cache.dtype}"


def _dense_elements(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The number of elements, if they fill one stretch of memory in some order; else None."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return expected


def _unknown(name: str, cache: Cache, why: str) -> ConfigError:
    return ConfigError(
        f"the KV cache of {name} is {list(cache.shape)} with strides {list(cache.strides)}: {why}. "
        "Penstock does not support this layout. Choose another attention backend, or start vLLM "
        "without Penstock."
    )
