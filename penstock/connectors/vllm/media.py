"""Names the images and other media of a request by their content.

vLLM identifies a medium by what it calls a hash. This may be a hash of the content, but also a
counter that restarts with every process, a name chosen by the user, or a hash of either, and it
does not show which. So media are named here by the numbers that the encoder receives. If those are
not available, a request with media is neither loaded nor saved.

vLLM caches encoder outputs by its own identifier. If one identifier appears with two contents, it
is unknown which of them a request was computed with, and all requests with it are not offloaded.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

log = logging.getLogger(__name__)

# More than vLLM's encoder cache can hold: what we forget, vLLM has evicted.
_MOST_NAMES = 200_000
_SHARED_MEMORY = "address"  # what vLLM passes instead of numbers if they are in shared memory

Places = dict[int, list[bytes]]


class Media:
    """The media that one engine has seen.

    Without `has_own_encoder`, encoder outputs come from elsewhere. With `adapters_encode`, LoRA
    adapters change them, and vLLM caches them by the adapter's name regardless of its weights.
    """

    def __init__(
        self,
        *,
        has_own_encoder: bool = True,
        adapters_encode: bool = False,
        most_names: int = _MOST_NAMES,
    ) -> None:
        self._may_name = has_own_encoder
        self._adapters_encode = adapters_encode
        self._most_names = most_names
        self._contents: dict[str, bytes] = {}  # by vLLM's name, the latest last
        self._doubtful: set[str] = set()
        self._has_warned = False

    def names(self, request: Any) -> Places | None:
        """The names of the request's media by start position. None if one cannot be named."""
        found: Places = {}
        for feature in _features(request):
            content = _content(feature) if self._may_name else None
            if content is None:
                self._warn("the numbers of its media are not available")
                self._doubt(feature.identifier)
                continue
            if self._contents.pop(feature.identifier, content) != content:
                self._warn("two different media have the same identifier")
                self._doubt(feature.identifier)
            self._contents[feature.identifier] = content
            while len(self._contents) > self._most_names:
                del self._contents[next(iter(self._contents))]
            place = feature.mm_position
            name = f"{feature.modality} {place.offset} {place.length} ".encode() + content
            found.setdefault(place.offset, []).append(name)
        return found if self.are_known(request) else None

    def are_known(self, request: Any) -> bool:
        """Whether each of the request's media still has one possible content."""
        features = _features(request)
        if not features:
            return True
        if self._adapters_encode and getattr(request, "lora_request", None) is not None:
            return False
        return self._may_name and not any(each.identifier in self._doubtful for each in features)

    def _doubt(self, identifier: str) -> None:
        self._doubtful.add(identifier)
        if len(self._doubtful) > self._most_names:
            self._may_name = False
            self._doubtful.clear()

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("A request with media is not offloaded: %s.", why)


def _features(request: Any) -> list[Any]:
    return getattr(request, "mm_features", None) or []


def _content(feature: Any) -> bytes | None:
    """A digest of the encoder's input and of the positions of its output."""
    data = feature.data
    if not isinstance(data, Mapping) or not data or _SHARED_MEMORY in data:
        return None
    hasher = blake3(b"penstock medium 1", max_threads=blake3.AUTO)
    for name in sorted(data):
        _add(hasher, b"name", str(name).encode())
        if not _add_value(hasher, data[name].data):
            return None
    mask = getattr(feature.mm_position, "is_embed", None)
    if not _add_value(hasher, mask):
        return None
    return hasher.digest()


def _add_value(hasher: Any, value: Any) -> bool:
    """False if the value cannot be read here: a tensor on a GPU, an object of unknown type."""
    match value:
        case None | bool() | int() | float() | str():
            _add(hasher, type(value).__name__.encode(), repr(value).encode())
            return True
        case list() | tuple():
            _add(hasher, b"list", str(len(value)).encode())
            return all(_add_value(hasher, each) for each in value)
        case Mapping():
            _add(hasher, b"mapping", str(len(value)).encode())
            return all(
                _add_value(hasher, str(key)) and _add_value(hasher, value[key])
                for key in sorted(value, key=str)
            )
    if not hasattr(value, "data_ptr") or str(value.device) != "cpu":
        return False
    tensor = value.contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    _add(hasher, b"tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hasher.update(num_bytes.to_bytes(8, "little"))
    if num_bytes:
        numbers = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
        hasher.update(memoryview(numbers).cast("B"))
    return True


def _add(hasher: Any, kind: bytes, said: bytes) -> None:
    for part in (kind, said):
        hasher.update(len(part).to_bytes(8, "little") + part)
