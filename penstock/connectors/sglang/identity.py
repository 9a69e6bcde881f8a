"""The namespace of KV in SGLang: everything that makes the KV of the same tokens differ.

SGLang's hashes of pages cover tokens, salt and the names of adapters. They do not cover the model,
its weights or the layout of its pages.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.connectors.sglang.harmless import harmless_arguments
from penstock.connectors.vllm.configuration import describe, digest
from penstock.connectors.vllm.fingerprint import process_start, state_of
from penstock.connectors.vllm.identity import Unknown, files_fingerprint
from penstock.connectors.vllm.places import find_files
from penstock.keys import Namespace

log = logging.getLogger(__name__)

_MODELSCOPE = "SGLANG_USE_MODELSCOPE"
_FROM_FILES = frozenset(
    [
        *("auto", "safetensors", "pt", "npcache", "gguf", "bitsandbytes", "mistral"),
        *("sharded_state", "layered", "fastsafetensors", "runai_streamer"),
    ]
)
_ABSENT: tuple[Any, ...] = (None, False, "", "auto", "off", [], {})
# Arguments that load weights from elsewhere, or change them while SGLang runs.
_REPLACE_WEIGHTS = (
    *("custom_weight_loader", "kt_weight_path", "rl_quant_profile", "uno_lora_path"),
    *("checkpoint_engine_wait_weights_before_ready", "decrypted_config_file"),
    *("decrypted_draft_config_file", "modelexpress_config", "quantization_param_path"),
    *("modelopt_checkpoint_restore_path", "quantize_and_serve", "ple_offload_dir"),
    "weight_cache_mode",  # a daemon has read them, maybe long ago
    "remote_instance_weight_loader_start_seed_via_transfer_engine",
)
# Variables that say where SGLang stores and logs, what a run is called, and what tests do.
_HARMLESS_VARIABLES = (
    *("SGLANG_HICACHE_", "SGLANG_TEST_", "SGLANG_LOG", "SGLANG_CACHE_DIR"),
    *("SGLANG_RUN_ID", "SGLANG_DISABLE_OUTLINES_DISK_CACHE"),
)


def model_namespace(
    arguments: Mapping[str, Any],
    version: str,
    config: Any,
    block_bytes: int,
    *,
    clients_name_media: bool = False,
) -> Namespace:
    """The namespace of the model that a server with these resolved arguments runs.

    `config` is SGLang's `HiCacheStorageConfig`. What differs between its pools and ranks is part of
    the keys instead. If `clients_name_media`, the namespace is for this run only.
    """
    return Namespace(
        model=str(arguments.get("model_path") or config.model_name),
        weights=_weights(arguments, clients_name_media=clients_name_media),
        dtype=f"{arguments.get('dtype')} kv {arguments.get('kv_cache_dtype')} "
        f"{arguments.get('quantization')}",
        layout=f"sglang {version} {config.model_name}: blocks of {block_bytes} bytes",
        block_tokens=max(1, int(arguments.get("page_size") or 1)),
        rope=_config_digest(arguments),
        shard_size=max(1, int(config.tp_size)),
        settings=digest(
            {
                "arguments": _counted(arguments),
                "environment": _environment(os.environ),
                "adapters": _adapters(arguments),
            }
        ),
    )


def _counted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    harmless = harmless_arguments()
    # The names of adapters are part of SGLang's hashes, and their weights are counted below.
    return {
        name: describe(value, f"SGLang's argument {name}")
        for name, value in arguments.items()
        if name not in harmless and name != "lora_paths"
    }


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("SGLANG_", "SGL_")) and not name.startswith(_HARMLESS_VARIABLES)
    }


def _weights(arguments: Mapping[str, Any], *, clients_name_media: bool) -> str:
    """The fingerprint of the weights and the drafter's, or a name for this run only."""
    if clients_name_media:
        log.warning(
            "Clients of SGLang may name the media in their prompts (mm_hashes), and two media with "
            "one name have one KV. KV is therefore not reused after a restart or by other "
            "instances; if you trust your clients, set trust_media_names."
        )
        return this_run()
    found = _model_weights(arguments)
    draft = arguments.get("speculative_draft_model_path")
    if draft and not isinstance(found, Unknown):
        drafter = files_fingerprint(
            str(draft),
            arguments.get("speculative_draft_model_revision"),
            arguments.get("download_dir"),
            _MODELSCOPE,
        )
        found = drafter if isinstance(drafter, Unknown) else f"{found} drafter {drafter}"
    if not isinstance(found, Unknown):
        return found
    log.warning(
        "Penstock cannot identify the weights of %s by their files: %s. KV is therefore not "
        "reused after a restart or by other instances.",
        arguments.get("model_path"),
        found,
    )
    return this_run()


def this_run() -> str:
    """A name that nothing stored before has."""
    return f"run {secrets.token_hex(16)}"


def _model_weights(arguments: Mapping[str, Any]) -> str:
    load_format = str(arguments.get("load_format") or "auto").rpartition(".")[2].lower()
    if load_format not in _FROM_FILES:
        return Unknown(f"load_format is {load_format}")
    for name in _REPLACE_WEIGHTS:
        if arguments.get(name) not in _ABSENT:
            return Unknown(f"{name} is set, which may replace them")
    return files_fingerprint(
        str(arguments["model_path"]),
        arguments.get("revision"),
        arguments.get("download_dir"),
        _MODELSCOPE,
    )


def _config_digest(arguments: Mapping[str, Any]) -> str:
    """The digest of config.json, the model's and the drafter's. Overrides are arguments."""
    found = [_one_config(arguments, "model_path", "revision")]
    if arguments.get("speculative_draft_model_path"):
        names = ("speculative_draft_model_path", "speculative_draft_model_revision")
        found.append(_one_config(arguments, *names))
    return " drafter ".join(found)


def _one_config(arguments: Mapping[str, Any], model: str, revision: str) -> str:
    name = str(arguments[model])
    folder = find_files(name, arguments.get(revision), "config.json", arguments.get("download_dir"))
    if folder is None:
        return "none"
    path = folder / "config.json"
    try:
        found = blake3(path.read_bytes()).hexdigest()
        is_local = Path(name).expanduser().exists()
        # SGLang has read it before us, and may have read something else.
        if not is_local or state_of(path).changed < process_start():
            return found
    except OSError:  # a GGUF file has its config inside
        return "none"
    log.warning(
        "%s changed after this process started. KV is therefore not reused after a restart or by "
        "other instances.",
        path,
    )
    return this_run()


def _adapters(arguments: Mapping[str, Any]) -> list[str]:
    """The adapters that are loaded at start. Those loaded later get random names from SGLang."""
    found = []
    for adapter in arguments.get("lora_paths") or ():
        path = getattr(adapter, "lora_path", None) or adapter
        name = str(path).partition("=")[2] or str(path)
        weights = files_fingerprint(name, None, arguments.get("download_dir"), _MODELSCOPE)
        if isinstance(weights, Unknown):
            log.warning(
                "Penstock cannot identify the adapter %s by its files: %s. KV is therefore not "
                "reused after a restart or by other instances.",
                name,
                weights,
            )
            weights = this_run()
        found.append(f"{getattr(adapter, 'lora_name', '')} {weights}")
    return found
