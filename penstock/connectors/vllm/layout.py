"""What vLLM's caches look like in memory: read, checked, and described for the namespace.

Whatever shape an attention backend gives its cache, a block must be one dense stretch of bytes in
each layer. Its inside is not looked into: it is kept and restored as it is, and its description is
part of the namespace, so that another shape, order or packing never meets it.
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
    """Where every block's bytes lie, and in words how. Raises ConfigError for an unknown layout.

    `page_bytes` is what vLLM says a block takes in one layer.
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
                name, cache, f"a block has {stretch.num_bytes} bytes, not the {page_bytes} of vLLM"
            )
        stretches.append(stretch)
        shapes.append(shape)
    if not stretches:
        raise ConfigError("vLLM registered no KV cache; there is nothing to offload.")
    words = f"{len(stretches)} layers of {shapes[0]}"
    if len(set(shapes)) > 1:
        words = " | ".join(shapes)
    return PagedMemory(tuple(stretches), num_blocks).merged(), words


def _read(name: str, cache: Cache, num_blocks: int) -> tuple[PageStretch, str]:
    rows = cache.shape[0] if cache.shape else 0
    if rows == 0 or rows % num_blocks:
        raise _unknown(name, cache, f"the first dimension does not count the {num_blocks} blocks")
    per_block = rows // num_blocks  # kernels may cut a block into smaller ones
    shape, strides = cache.shape[1:], cache.strides[1:]
    num_elements = _dense_elements(shape, strides)
    if num_elements is None or cache.strides[0] < num_elements:
        raise _unknown(name, cache, "a block's bytes have gaps, or blocks lie within each other")
    if per_block > 1 and cache.strides[0] != num_elements:
        raise _unknown(name, cache, "the parts of a block do not follow each other")
    stretch = PageStretch(
        cache.address,
        cache.strides[0] * per_block * cache.element_bytes,
        num_elements * per_block * cache.element_bytes,
    )
    return stretch, f"{per_block}x{list(shape)} strides {list(strides)} {cache.dtype}"


def _dense_elements(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """How many elements a block has, if they fill one stretch of memory in some order."""
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
        "Penstock does not know this layout; choose another attention backend, or start vLLM "
        "without Penstock."
    )
