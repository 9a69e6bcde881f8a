"""What SGLang takes from CUDA, done by a CPU, in every process that the tests start.

SGLang can compute on a CPU, but its wheel brings no kernels for it, and its hierarchical cache was
written for GPUs. Replaced are: one kernel that copies KV between two tensors, the pinning of
memory, and streams and events, which have nothing to wait for here. All else is SGLang's own.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch

_ABSENT = {"sgl_kernel", "torchvision"}  # of the first there is no wheel for a CPU
_find_spec = importlib.util.find_spec


def _find(name: str, package: str | None = None) -> Any:
    """Transformers must see that torchvision is not there."""
    if name == "torchvision" and "transformers" in sys._getframe(1).f_code.co_filename:
        return None
    return _find_spec(name, package)


class _Absent:
    """Something that is imported and never called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{self._name} is not available on this machine")


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.split(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _Event:
    def __init__(self, **_: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Stream(torch.cpu.Stream):
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return True


class _Cudart:
    def cudaHostRegister(self, *_: object) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, *_: object) -> int:  # noqa: N802
        return 0


def transfer_kv_direct(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


importlib.util.find_spec = _find
sys.meta_path.append(_Finder())
torch.cpu.Event, torch.cpu.Stream = _Event, _Stream  # type: ignore[attr-defined, misc, assignment]
torch.cuda.cudart = _Cudart  # type: ignore[assignment]
builtins.transfer_kv_direct = transfer_kv_direct  # type: ignore[attr-defined]  # only imported on GPUs
