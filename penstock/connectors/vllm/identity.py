"""The namespace and keys of KV in vLLM: everything that makes the KV of the same tokens differ.

We do not use vLLM's block hashes: they depend on a seed, on Python's pickling or on the chosen
algorithm, and do not depend on the model at all.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.connectors.vllm.adapters import Adapters
from penstock.connectors.vllm.configuration import (
    adapter_settings,
    config_digest,
    configuration_digest,
)
from penstock.connectors.vllm.fingerprint import fingerprint_files, process_start, state_of
from penstock.connectors.vllm.media import Media, Places
from penstock.connectors.vllm.orders import Shard
from penstock.connectors.vllm.places import find_files
from penstock.errors import ConfigError
from penstock.groups.kinds import Group, Groups
from penstock.keys import KeyChain, Namespace
from penstock.types import BlockKey

log = logging.getLogger(__name__)

# Load formats that read their weights only from files in the model's folder.
_FROM_FILES = frozenset(
    [
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache"),
        *("pt", "gguf", "bitsandbytes", "sharded_state", "runai_streamer"),
        *("runai_streamer_sharded",),
    ]
)


def model_namespace(
    vllm_config: Any,
    version: str,
    shards: Sequence[Shard],
    *,
    block_tokens: int | None = None,
    groups: str = "",
    loss: str = "",
) -> Namespace:
    """The namespace of a model as this vLLM runs it, without LoRA adapter and salt.

    `groups` describes its KV cache groups; empty for one group of plain attention. `loss` names
    the lossy codecs of all tiers.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layout = _layout(shards)
    if groups:
        layout += f"; groups {groups}"
    weights = weights_name(vllm_config)
    if drafter := drafter_name(vllm_config):
        weights += f" drafter {drafter}"
    return Namespace(
        model=str(model.model),
        weights=weights,
        dtype=f"{model.dtype} kv {cache.cache_dtype} {model.quantization}",
        layout=f"vllm {version}: {layout}",
        block_tokens=cache.block_size if block_tokens is None else block_tokens,
        rope=_model_digest(model),
        shard_size=len(shards),
        settings=configuration_digest(vllm_config),
        loss=loss,
    )


def _layout(shards: Sequence[Shard]) -> str:
    """The layouts of all stages of the pipeline. Within a stage all workers must have the same."""
    stages: dict[int, set[tuple[str, int]]] = {}
    for shard in shards:
        stages.setdefault(shard.stage, set()).add((shard.layout, shard.block_bytes))
    if not stages or any(len(found) > 1 for found in stages.values()):
        layouts = sorted({shard.layout for shard in shards})
        raise ConfigError(
            "the workers store KV in different layouts, but Penstock needs the same one in all: "
            + " / ".join(layouts)
        )
    if len(stages) == 1:
        return shards[0].layout
    return " / ".join(
        f"stage {stage}: {layout}" for stage, found in sorted(stages.items()) for layout, _ in found
    )


def drafter_name(vllm_config: Any) -> str:
    """The fingerprint of a drafter's own weights: its layers have KV beside the model's."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or getattr(speculative, "method", "") == "ngram":
        return ""
    if str(draft.model) == str(vllm_config.model_config.model):
        return "of the model"
    folder = getattr(vllm_config.load_config, "download_dir", None)
    found = files_fingerprint(str(draft.model), draft.revision, folder)
    if isinstance(found, Unknown):
        log.warning(
            "Penstock cannot identify the weights of the drafter %s by their files: %s. KV is "
            "therefore not reused after a restart or by other instances.",
            draft.model,
            found,
        )
        return f"run {secrets.token_hex(16)}"
    return found


def weights_name(vllm_config: Any) -> str:
    """The fingerprint of the weights, or a name for this run only if files do not determine it."""
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto")).lower()
    if "dummy" in load_format and model.quantization is None:
        return f"dummy {model.seed}"
    found = _fingerprint(vllm_config, load_format.rpartition(".")[2])
    if isinstance(found, Unknown):
        log.warning(
            "Penstock cannot identify the weights of %s by their files: %s. KV is therefore not "
            "reused after a restart or by other instances.",
            model.model,
            found,
        )
        return f"run {secrets.token_hex(16)}"
    return found


class Unknown(str):
    """Why weights have no fingerprint."""


def _fingerprint(vllm_config: Any, load_format: str) -> str:
    model = vllm_config.model_config
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return Unknown("weight_transfer_config allows replacing them while vLLM runs")
    if "dummy" in load_format:
        return Unknown("dummy weights of quantized models are uninitialized memory")
    if load_format not in _FROM_FILES:
        return Unknown(f"load_format is {load_format}")
    if others := _other_models(model.hf_config):
        return Unknown(f"they are partly loaded from {others}")
    name = getattr(model, "model_weights", "") or str(model.model)
    return files_fingerprint(
        name, model.revision, getattr(vllm_config.load_config, "download_dir", None)
    )


def files_fingerprint(
    name: str, revision: str | None, folder: str | None, modelscope: str = "VLLM_USE_MODELSCOPE"
) -> str:
    """The fingerprint of the files from which an engine loads weights.

    `modelscope` is the variable that makes it load them from ModelScope.
    """
    is_local = Path(name).expanduser().exists()
    if not is_local and os.environ.get(modelscope, "").lower() in {"1", "true"}:
        return Unknown("they are loaded from ModelScope")
    source = find_files(name, revision, "config.json", folder)
    if source is None:
        return Unknown("they are not on this machine")
    # Files in a local folder may be overwritten; files in a hub's cache never are.
    try:
        if is_local and state_of(source).changed >= process_start():
            return Unknown("files changed after this process started")
    except OSError as error:
        return Unknown(str(error))
    return fingerprint_files(source) or Unknown("its folder has no readable weights")


def _other_models(hf_config: Any) -> str:
    """Other models that this model includes, each with its own weights."""
    said = hf_config.to_dict()
    return ", ".join(
        str(said[key]) for key in sorted(said) if key.endswith("_model_id") and said[key]
    )


def _model_digest(model: Any) -> str:
    digests = [config_digest(model.hf_config)]
    text = getattr(model, "hf_text_config", None)
    if text is not None and text is not model.hf_config:
        digests.append(config_digest(text))
    return blake3(" ".join(digests).encode()).hexdigest()


def _learns_scales(model: Any) -> bool:
    """Whether the encoder's output depends on earlier media, from which it learns its scales."""
    media = getattr(model, "multimodal_config", None)
    is_fp8 = "fp8" in str(getattr(media, "mm_encoder_attn_dtype", None))
    return is_fp8 and getattr(media, "mm_encoder_fp8_scale_path", None) is None


class Naming:
    """Names the KV of one engine's requests."""

    def __init__(self, adapters: Adapters | None = None, media: Media | None = None) -> None:
        self._adapters = adapters or Adapters()
        self._media = media or Media()

    @classmethod
    def of(cls, vllm_config: Any) -> Naming:
        lora = vllm_config.lora_config
        managed = getattr(vllm_config, "ec_manager_config", None)
        encodes_here = (
            getattr(vllm_config, "ec_transfer_config", None) is None
            and getattr(managed, "encoder_cache_manager_cls", None) is None
            and not _learns_scales(vllm_config.model_config)
        )
        media = Media(
            has_own_encoder=encodes_here,
            adapters_encode=bool(getattr(lora, "enable_tower_connector_lora", False)),
        )
        return cls(Adapters("" if lora is None else adapter_settings(lora)), media)

    def namespace(self, base: Namespace, request: Any) -> Namespace | None:
        """The namespace of a request. None if its tokens do not determine its KV."""
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return None
        if getattr(request, "resumable", False):
            return None  # a streaming session may retract tokens
        adapter = self._adapter(request)
        if adapter is None:
            return None
        tenant = tenant_of(request)
        return replace(
            base,
            adapter=adapter,
            tenant=f"{base.tenant} {tenant}" if base.tenant else tenant,
        )

    def keys(
        self, base: Namespace, request: Any, groups: Groups | None = None
    ) -> RequestKeys | None:
        """The keys of a request's blocks. None if its KV cannot be named."""
        places = self._media.names(request)
        namespace = self.namespace(base, request)
        if namespace is None or places is None:
            return None
        return RequestKeys(namespace, request, places, groups)

    def holds(self, keys: RequestKeys) -> bool:
        """Whether keys still name the request's KV: files and names may change while it runs."""
        request = keys.request
        return self._adapter(request) == keys.adapter and self._media.are_known(request)

    def _adapter(self, request: Any) -> str | None:
        lora = getattr(request, "lora_request", None)
        return "" if lora is None else self._adapters.name(lora)


class RequestKeys:
    """The keys of one request's full blocks, as its tokens become known.

    One chain of keys follows the tokens. Where several groups have blocks that end at the same
    token, the key of each is made from the chain's key there and the group.
    """

    def __init__(
        self,
        namespace: Namespace,
        request: Any,
        media: Places | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.request = request
        self._of_group: dict[int, list[BlockKey]] | None = None
        if groups is not None and not groups.is_plain:
            self._of_group = {group.index: [] for group in groups}
        self.adapter = namespace.adapter
        self._num_tokens = 0
        self._block_tokens = namespace.block_tokens
        self._media = media or {}
        self._chain = KeyChain(namespace)

    def first(self, num_tokens: int) -> list[BlockKey]:
        """The keys of all full blocks in the first `num_tokens` tokens, which must be known."""
        if num_tokens > self._num_tokens:
            self._extend(num_tokens)
        return self._chain.keys[: num_tokens // self._block_tokens]

    def of_group(self, group: Group, num_tokens: int) -> list[BlockKey]:
        """The keys of a group's full blocks in the first `num_tokens` tokens."""
        chain = self.first(num_tokens)
        if self._of_group is None:
            return chain
        keys = self._of_group[group.index]
        num_blocks = num_tokens // group.block_tokens
        per_block = group.block_tokens // self._block_tokens
        for index in range(len(keys), num_blocks):
            keys.append(group_key(chain[(index + 1) * per_block - 1], group.index))
        return keys[:num_blocks]

    def _extend(self, num_tokens: int) -> None:
        tokens = self.request.all_token_ids[self._num_tokens : num_tokens]
        if not self._media:
            self._chain.extend(tokens)
        else:
            # A medium's name is part of the block in which it starts; all later keys depend on it.
            for position, token in enumerate(tokens, self._num_tokens):
                for name in self._media.get(position, ()):
                    self._chain.mix(name)
                self._chain.extend((token,))
        self._num_tokens = num_tokens


def group_key(key: BlockKey, index: int) -> BlockKey:
    """The key of a group's block that ends where the chain's key is `key`."""
    return BlockKey(blake3(b"penstock group 1" + index.to_bytes(4, "little") + key).digest())


def tenant_of(request: Any) -> str:
    """The tenant, within which KV is shared: vLLM's salt, or empty without one."""
    salt = getattr(request, "cache_salt", None)
    return "" if salt is None else f"salt {salt}"
