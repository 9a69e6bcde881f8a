"""Reads and checks the memory layout of vLLM's caches, and describes it for the namespace.

Whatever shape an attention backend gives its cache, a block must be one dense stretch of bytes in
each layer. These bytes are saved and restored unchanged. Their description is part of the
namespace, so that KV with another shape, order or packing is never mixed with them.

With several KV cache groups the layers of one group use the same memory as those of another: a
block belongs to one group at a time. A block is then the union of what all layers may use of it,
and is copied whole, whichever group it belongs to.
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


def read_union(
    caches: Mapping[str, Cache], num_blocks: int, pages: Mapping[str, int]
) -> tuple[PagedMemory, str]:
    """The memory of every block for layers that share it, and its layout in words.

    `pages` has the size of a block in each layer, with padding. Layers without one are left out.
    """
    stretches: list[PageStretch] = []
    kept = {name: cache for name, cache in caches.items() if name in pages}
    for name, cache in kept.items():
        if not _add(stretches, _page(name, cache, num_blocks, pages[name]), num_blocks):
            raise _unknown(name, cache, "its blocks overlap those of other layers in part")
    if not stretches:
        raise ConfigError("vLLM registered no KV cache to offload. Start vLLM without Penstock.")
    memory = PagedMemory(tuple(stretches), num_blocks).merged()
    words = [
        f"{name} at {memory.offset(cache.address)}: {pages[name]} bytes of "
        f"{list(cache.shape[1:])} strides {list(cache.strides)} {cache.dtype}"
        for name, cache in kept.items()
    ]
    return memory, " | ".join(words)


def _page(name: str, cache: Cache, num_blocks: int, page_bytes: int) -> PageStretch:
    """A layer's block as a whole page, including its padding."""
    rows = cache.shape[0] if cache.shape else 0
    if rows == 0 or rows % num_blocks:
        raise _unknown(
            name,
            cache,
            f"the first dimension is not a multiple of {num_blocks}, the number of blocks",
        )
    per_block = rows // num_blocks
    stride_bytes = cache.strides[0] * per_block * cache.element_bytes
    inside = [(per_block, cache.strides[0]), *zip(cache.shape[1:], cache.strides[1:], strict=True)]
    last = sum((size - 1) * stride for size, stride in inside)
    if min(cache.strides) < 0 or (last + 1) * cache.element_bytes > page_bytes:
        raise _unknown(name, cache, f"a block has more than the {page_bytes} bytes that vLLM says")
    if stride_bytes < page_bytes:
        raise _unknown(name, cache, f"blocks of {page_bytes} bytes overlap")
    return PageStretch(cache.address, stride_bytes, page_bytes)


def _add(stretches: list[PageStretch], new: PageStretch, num_blocks: int) -> bool:
    """Add a layer's pages to the union. Returns whether they fit.

    The order is that in which layers are registered. Addresses differ from run to run.
    """
    touched = [
        place for place, old in enumerate(stretches) if _regions_overlap(old, new, num_blocks)
    ]
    touched = [place for place in touched if not _interleave(stretches[place], new)]
    if not touched:
        stretches.append(new)
        return True
    joined = [new, *(stretches[place] for place in touched)]
    start = min(stretch.address for stretch in joined)
    end = max(stretch.address + stretch.num_bytes for stretch in joined)
    strides = {stretch.stride_bytes for stretch in joined}
    if len(strides) > 1 or end - start > new.stride_bytes:
        return False
    stretches[touched[0]] = PageStretch(start, new.stride_bytes, end - start)
    for place in reversed(touched[1:]):
        del stretches[place]
    return True


def _regions_overlap(one: PageStretch, two: PageStretch, num_blocks: int) -> bool:
    def end(stretch: PageStretch) -> int:
        return stretch.address + stretch.stride_bytes * (num_blocks - 1) + stretch.num_bytes

    return one.address < end(two) and two.address < end(one)


def _interleave(one: PageStretch, two: PageStretch) -> bool:
    """Whether two layers lie side by side in each block, and share no bytes."""
    if one.stride_bytes != two.stride_bytes:
        return False
    apart = (two.address - one.address) % one.stride_bytes
    return apart >= one.num_bytes and apart + two.num_bytes <= one.stride_bytes


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
