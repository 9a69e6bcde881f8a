"""What makes KV of the same tokens differ in vLLM, as a namespace and as keys.

Keys are ours, not vLLM's block hashes: those depend on a seed, on Python's pickling or on the
algorithm chosen, and know the model by nothing at all.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.connectors.vllm.fingerprint import fingerprint_files
from penstock.connectors.vllm.orders import Shard
from penstock.errors import ConfigError
from penstock.keys import KeyChain, Namespace
from penstock.types import BlockKey

log = logging.getLogger(__name__)

# Of a model's config, what says nothing about its KV.
_OUTSIDE_KV = ("_name_or_path", "transformers_version", "architectures")


def model_namespace(vllm_config: Any, version: str, shards: Sequence[Shard]) -> Namespace:
    """The namespace of a model as this vLLM runs it, LoRA and salt aside."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layouts = {shard.layout for shard in shards}
    if len(layouts) != 1 or len({shard.block_bytes for shard in shards}) != 1:
        raise ConfigError(
            "the workers keep KV in different layouts; Penstock needs one for all: "
            + " / ".join(sorted(layouts))
        )
    return Namespace(
        model=str(model.model),
        weights=weights_name(vllm_config),
        dtype=f"{model.dtype} kv {cache.cache_dtype} {model.quantization}",
        layout=f"vllm {version}: {layouts.pop()}",
        block_tokens=cache.block_size,
        rope=_config_digest(model.hf_config),
        shard_size=len(shards),
    )


def weights_name(vllm_config: Any) -> str:
    """The fingerprint of the weights; where there are no files to read, a name of this run only."""
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto")).lower()
    if "dummy" in load_format:
        return f"dummy {model.seed}"
    found = None
    if (source := _find_files(str(model.model), model.revision)) is not None:
        found = fingerprint_files(source)
    if found is None:
        log.warning(
            "the files of %s cannot be read to fingerprint its weights: KV is kept for this run "
            "only, and not shared with the next.",
            model.model,
        )
        return f"run {secrets.token_hex(16)}"
    return found


def adapter_name(lora_request: Any) -> str:
    """A LoRA adapter, by its files; where they cannot be read, by its name in this run alone."""
    if lora_request is None:
        return ""
    path = Path(str(lora_request.lora_path)).expanduser()
    found = fingerprint_files(path, beside=_ADAPTER_FILES) if path.exists() else None
    return f"{lora_request.lora_name} {found or 'run ' + _RUN}"


_RUN = secrets.token_hex(16)
_ADAPTER_FILES = ("adapter_config.json",)  # the same matrices may be scaled otherwise


class RequestKeys:
    """The keys of one request's full blocks, as its tokens become known."""

    def __init__(self, namespace: Namespace, request: Any) -> None:
        self._request = request
        self._num_tokens = 0
        self._block_tokens = namespace.block_tokens
        self._media = _media(request)
        self._chain = KeyChain(namespace)

    def first(self, num_tokens: int) -> list[BlockKey]:
        """Those of all full blocks within the first `num_tokens`, which must be known."""
        if num_tokens > self._num_tokens:
            self._extend(num_tokens)
        return self._chain.keys[: num_tokens // self._block_tokens]

    def _extend(self, num_tokens: int) -> None:
        tokens = self._request.all_token_ids[self._num_tokens : num_tokens]
        if not self._media:
            self._chain.extend(tokens)
        else:
            # Media are named in the block in which they begin; all later keys depend on it.
            for position, token in enumerate(tokens, self._num_tokens):
                for name in self._media.get(position, ()):
                    self._chain.mix(name)
                self._chain.extend((token,))
        self._num_tokens = num_tokens


def tenant_of(request: Any) -> str:
    """Who shares KV with whom: vLLM's salt, empty for everybody."""
    salt = getattr(request, "cache_salt", None)
    return "" if salt is None else f"salt {salt}"


def namespace_of(base: Namespace, request: Any, adapters: Callable[[Any], str]) -> Namespace | None:
    """The namespace of a request; None for one whose KV cannot be named by its tokens."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    if getattr(request, "resumable", False):
        return None  # a session that is fed while it runs may take tokens back
    lora = getattr(request, "lora_request", None)
    tenant = tenant_of(request)
    return replace(
        base,
        adapter=adapters(lora) if lora is not None else "",
        tenant=f"{base.tenant} {tenant}" if base.tenant else tenant,
    )


def _media(request: Any) -> dict[int, list[bytes]]:
    """Images and the like: where they begin, and what their content is called."""
    found: dict[int, list[bytes]] = {}
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        name = f"{feature.modality} {place.offset} {place.length} {feature.identifier}"
        found.setdefault(place.offset, []).append(name.encode())
    return found


def _config_digest(hf_config: Any) -> str:
    """Of everything else that a model's config says, rope and its scaling among it."""
    known = {k: v for k, v in hf_config.to_dict().items() if k not in _OUTSIDE_KV}
    return blake3(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _find_files(model: str, revision: str | None) -> Path | None:
    path = Path(model).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception as error:  # not a hub's name at all
        log.info("%s is not in the hub's cache: %s", model, error)
        return None
    return Path(config).parent if isinstance(config, str) else None
