"""`PenstockStorage`: what SGLang's cache controller calls.

SGLang calls from several threads, each with host memory that is its own until we return. Every call
may fail: then pages are not there, or not stored, and SGLang computes.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_server_args, process_model_config

from penstock.config import Config
from penstock.connectors.borrowed import open_below, serve_metrics
from penstock.connectors.sglang.exchange import BlockExchange
from penstock.connectors.sglang.hits import PoolPresence, leading, usable
from penstock.connectors.sglang.identity import model_namespace
from penstock.connectors.sglang.pages import PageFormat, block_bytes_for
from penstock.connectors.sglang.ranks import check_ranks, own_disk, place_of, rank_of
from penstock.connectors.sglang.settings import SglangSettings
from penstock.connectors.sglang.support import (
    check_version,
    describe_pool,
    page_bytes,
)
from penstock.errors import ConfigError
from penstock.metrics import Metrics
from penstock.metrics.endpoint import MetricsEndpoint
from penstock.stores.host import HostArena
from penstock.types import BlockKey
from penstock.units import MiB, format_bytes

log = logging.getLogger(__name__)

_BUFFER_BYTES = 64 * MiB  # for loads, and as much for saves
_INDEX_SECONDS = 10.0  # SGLang starts later by so much at most
_MAIN = str(PoolName.KV)
# Pools whose pages differ between tensor-parallel ranks even if those of the main pool do not.
_ALWAYS_SHARDED = (str(PoolName.MAMBA),)


class _Left(NamedTuple):
    """What a storage knew of SGLang's main pool when it was detached."""

    salt: bytes
    flushed: Any


# SGLang can detach a storage and attach another one while it runs. Weights may be replaced before.
_left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()


class PenstockStorage(HiCacheStorage):  # type: ignore[misc]
    """The store of one rank."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        """Read the settings. The tiers are opened once the pools are known. Raises ConfigError."""
        del kwargs
        self._settings = SglangSettings.of(storage_config.extra_config)
        check_version(sglang.__version__, insist=self._settings.allow_untested_sglang)
        self._storage_config = storage_config
        arguments = get_server_args().resolved_dict()
        num_groups = max(1, int(arguments.get("dp_size") or 1))
        self._config = own_disk(self._settings.tiers(), storage_config, num_groups)
        check_ranks(storage_config, self._config)
        self._pools: dict[str, Any] = {}
        self._formats: dict[str, PageFormat] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._exchange: BlockExchange | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._block_bytes = 0
        self._opening, self._turning = threading.Lock(), threading.Lock()
        self._salt = b""
        self._flushed: Any = None  # what SGLang's host pool replaces when it is flushed
        self._is_from_start = arguments.get("hicache_storage_backend") == "dynamic"

    # SGLang's pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(_MAIN, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the tiers. Raises ConfigError, and SGLang does not start."""
        with self._opening:
            if self._exchange is None:
                self._exchange = self._open()
                # SGLang asks once for a prompt: one that comes early would find nothing.
                if not self.recover(_INDEX_SECONDS):
                    log.info("The index of the disk is still being read; more is found later")

    def _register(self, name: str, pool: Any) -> None:
        if self._pools.get(name) is pool:
            return
        num_bytes = page_bytes(name, pool)
        if not self._block_bytes:
            self._block_bytes = block_bytes_for(num_bytes)
            self._resume(pool)
        rank = rank_of(self._storage_config, is_replicated=self._is_replicated(name, pool))
        self._formats[name] = PageFormat(
            name, f"{describe_pool(pool)}; {rank}", num_bytes, self._block_bytes
        )
        self._dtypes[name] = pool.get_data_page(0, flat=True).dtype
        self._pools[name] = pool

    def _resume(self, pool: Any) -> None:
        """Go on with the salt of the storage that was attached to this pool before."""
        self._flushed = getattr(pool, "slot_used", None)
        if self._settings.weights_stay:
            return
        if self._flushed is None:
            raise ConfigError(
                f"SGLang's pool {type(pool).__name__} does not show when SGLang flushes its cache, "
                "as it does after its weights were replaced; if you never replace them in a "
                "running server, set weights_stay."
            )
        if (left := _left.get(pool)) is not None:
            self._salt, self._flushed = left
        elif not self._is_from_start:
            self._leave("Penstock was attached to a running SGLang, whose weights may be others")

    def _is_replicated(self, name: str, pool: Any) -> bool:
        """Whether all tensor-parallel ranks have the same values in this pool."""
        if not self._storage_config.is_mla_model or name in _ALWAYS_SHARDED:
            return False
        # A drafter with attention heads may help an MLA model: each rank has its own heads.
        return name == _MAIN or not isinstance(pool, MHATokenToKVPoolHost)

    def _open(self) -> BlockExchange:
        config, metrics = self._config, Metrics()
        arguments = {**get_server_args().resolved_dict(), "the device": _device()}
        takes_media = bool(process_model_config().is_multimodal)
        namespace = model_namespace(
            arguments,
            sglang.__version__,
            self._storage_config,
            self._block_bytes,
            clients_name_media=takes_media and not self._settings.trust_media_names,
        )
        spec = namespace.block_spec(self._block_bytes)
        if (port := self._settings.metrics_port) is not None:
            self._endpoint = serve_metrics(metrics, port + place_of(self._storage_config))
        num_buffers = max(1, _BUFFER_BYTES // spec.stride_bytes)
        buffers = HostArena(spec, 2 * num_buffers * spec.stride_bytes)
        tiers = open_below(
            config,
            spec,
            buffers,
            observers=[metrics],
            name=f"SGLang, process {os.getpid()}",
        )
        pages = ", ".join(
            f"{each.pool} {format_bytes(each.page_bytes)}" for each in self._formats.values()
        )
        log.info("Penstock keeps SGLang's pages (%s) in %s", pages, _where(config))
        return BlockExchange(tiers, buffers, load_seconds=config.transfer.load_deadline_seconds)

    # Questions.

    def exists(self, key: str) -> bool:
        return self._find(_MAIN, [key])[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return leading(self._find(_MAIN, keys, is_request=True))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        main = PoolPresence(_MAIN, self._find(_MAIN, keys, is_request=True))
        num_main = leading(main.present)
        others = []
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # not stored: SGLang reads no verdict as nothing known
            is_trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            present = self._find(str(transfer.name), keys[:num_main])
            num_trailing = max(1, len(transfer.keys or ())) if is_trailing else None
            others.append(PoolPresence(str(transfer.name), present, num_trailing))
        hits = usable(main, others)
        return PoolTransferResult(hits.num_pages, dict(hits.by_pool), hits.lengths)

    def _find(self, pool: str, hashes: Sequence[str], *, is_request: bool = False) -> list[bool]:
        found, exchange = self._formats.get(pool), self._working()
        if found is None or exchange is None or not hashes:
            return [False] * len(hashes)
        keys = found.keys(hashes, self._current_salt())
        return found.whole(exchange.find(keys, is_request=is_request))

    # Pages by their place in a host pool.

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._load_pool(_MAIN, keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._save_pool(_MAIN, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            transfer.name: self._load_pool(
                str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            transfer.name: self._save_pool(
                str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def _load_pool(
        self, name: str, hashes: Sequence[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        places = self._places(name, hashes, host_indices)
        if places is None:
            return [False] * len(hashes)
        pool = self._pools[name]

        def take(index: int, page: torch.Tensor) -> None:
            pool.set_from_flat_data_page(places[index], page)

        return self._load(name, hashes, take, extra_info)

    def _save_pool(
        self, name: str, hashes: Sequence[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        places = self._places(name, hashes, host_indices)
        if places is None:
            return [False] * len(hashes)
        pool = self._pools[name]
        return self._save(
            name, hashes, lambda index: pool.get_data_page(places[index], flat=True), extra_info
        )

    def _places(self, name: str, hashes: Sequence[str], host_indices: Any) -> list[int] | None:
        """Where each page begins in its pool. None if SGLang's indices are not whole pages."""
        pool = self._pools.get(name)
        if pool is None:
            return None
        size = int(getattr(pool, "page_size", 1) or 1)
        if host_indices is None or host_indices.numel() != len(hashes) * size:
            log.warning("%s: SGLang gave indices that are not %d pages", name, len(hashes))
            return None
        return [int(place) for place in host_indices[::size].tolist()]

    # Pages as tensors of their own.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        targets = list(target_locations or [None] * len(keys))
        if self._pools.get(_MAIN) is None:
            return [None] * len(keys)
        for index, target in enumerate(targets):
            if target is None:
                size = self._formats[_MAIN].page_bytes // self._dtypes[_MAIN].itemsize
                targets[index] = torch.empty(size, dtype=self._dtypes[_MAIN])
        arrived: list[Any] = [None] * len(keys)

        def take(index: int, page: torch.Tensor) -> None:
            if targets[index].numel() * targets[index].element_size() == page.nbytes:
                _bytes(targets[index])[:] = page.view(torch.uint8)
                arrived[index] = targets[index]

        self._load(_MAIN, keys, take, None)
        return arrived

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        found = self._formats.get(_MAIN)
        if found is None or values is None or len(values) != len(keys):
            return False
        if any(value is None or value.nbytes != found.page_bytes for value in values):
            log.warning("SGLang gave a page that does not have %d bytes", found.page_bytes)
            return False
        return all(self._save(_MAIN, keys, lambda index: values[index], None))

    # The tiers.

    def _load(self, name: str, hashes: Sequence[str], take: Any, extra_info: Any) -> list[bool]:
        """Pages are handed over whole and in their order."""
        found, exchange = self._formats[name], self._working()
        arrived = [False] * len(hashes)
        if exchange is None:
            return arrived
        dtype = self._dtypes[name]
        page = torch.empty(found.page_bytes, dtype=torch.uint8)

        def take_part(index: int, block: memoryview) -> None:
            number, part = divmod(index, found.num_parts)
            place = found.part(part)
            size = place.stop - place.start
            page[place] = torch.frombuffer(block, dtype=torch.uint8, count=size)
            # The first parts of this page may be missing, and the last ones of the page before.
            if parts and parts[0][0] != number:
                parts.clear()
            parts.append((number, part))
            if len(parts) == found.num_parts:
                take(number, page.view(dtype))
                arrived[number] = True

        parts: list[tuple[int, int]] = []  # those of one page that have arrived
        keys = found.keys(hashes, self._current_salt())
        whole = found.whole(exchange.load(keys, take_part, parent=self._parent(found, extra_info)))
        return [one and other for one, other in zip(arrived, whole, strict=True)]

    def _save(self, name: str, hashes: Sequence[str], page_at: Any, extra_info: Any) -> list[bool]:
        found, exchange = self._formats[name], self._working()
        if exchange is None:
            return [False] * len(hashes)
        pages: dict[int, Any] = {}  # the one that is being copied

        def fill(index: int, block: memoryview) -> None:
            number, part = divmod(index, found.num_parts)
            if number not in pages:
                pages.clear()
                pages[number] = _bytes(page_at(number))
            place = found.part(part)
            size = place.stop - place.start
            target = torch.frombuffer(block, dtype=torch.uint8)
            target[:size] = pages[number][place]
            target[size:] = 0

        keys = found.keys(hashes, self._current_salt())
        return found.whole(exchange.save(keys, fill, parent=self._parent(found, extra_info)))

    def _parent(self, found: PageFormat, extra_info: Any) -> BlockKey | None:
        """The block before the first, if SGLang tells (hicache_storage_pass_prefix_keys)."""
        before = getattr(extra_info, "prefix_keys", None)
        return found.keys(before[-1:], self._salt)[-1] if before else None

    def _working(self) -> BlockExchange | None:
        exchange = self._exchange
        return exchange if exchange is not None and exchange.is_working else None

    # The rest of SGLang's calls.

    def _current_salt(self) -> bytes:
        """Part of all keys. It changes when SGLang flushes its cache.

        SGLang does so after its weights were replaced in place, and does not say why.
        """
        if self._settings.weights_stay:
            return self._salt
        now = getattr(self._pools[_MAIN], "slot_used", None)
        with self._turning:  # nobody may use the old salt once one thread has seen the flush
            if now is not self._flushed:
                self._leave("SGLang has flushed its cache, maybe because its weights were replaced")
                self._flushed = now
            return self._salt

    def clear(self) -> None:
        """Find nothing any more that was stored until now. A restart finds it again."""
        self._leave("SGLang was asked to clear its storage")

    def _leave(self, why: str) -> None:
        self._salt = secrets.token_bytes(16)
        exchange = self._working()
        if exchange is not None and self._config.node.url is None:
            exchange.forget()
        log.warning(
            "%s: KV stored before is not used until SGLang is restarted, and KV stored from now on "
            "is for this run only",
            why,
        )

    def get_stats(self) -> None:
        """SGLang's metrics of storage have no place for ours, which are at `metrics_port`."""

    def recover(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until the index of the disk has been read. Serving does not need it."""
        exchange = self._working()
        return exchange is not None and exchange.recover(timeout_seconds)

    def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            _left[self._pools[_MAIN]] = _Left(self._salt, self._flushed)
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if exchange is not None and not exchange.close():
            log.warning("A tier did not answer in time; the pages not yet written to it are lost")


def _device() -> str:
    """The kind of device: kernels and layouts are chosen by it."""
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"


def _bytes(page: torch.Tensor) -> torch.Tensor:
    return page.contiguous().view(-1).view(torch.uint8)


def _where(config: Config) -> str:
    if config.node.url is not None:
        return f"the node at {config.node.url}"
    places = [f"{format_bytes(config.host.size_bytes)} of DRAM"]
    if config.disk.path is not None:
        places.append(f"{format_bytes(config.disk.size_bytes)} in {config.disk.path}")
    if config.remote.url is not None:
        places.append("a remote store")
    return " and ".join(places)
