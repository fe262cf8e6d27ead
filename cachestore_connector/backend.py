"""`CacheStore`: SGLang's HiCacheStorage interface on the native store.

Once attached, nothing here raises into SGLang: its storage threads end with the first exception.
A call that can't be served answers with misses or False, is counted, and is logged at a bounded
rate. What is wrong with the settings or the host pool is raised at attach, where SGLang reports it.

Threads (SGLang 0.5.23): lookups come from the prefetch thread, loads from the prefetch I/O thread,
dumps from the backup thread, the rest from the scheduler. All may come at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from . import config as settings
from . import identity as identities
from . import model_facts, weights
from .errors import Code, ConfigError, StoreClosed
from .flat_pages import FlatPages
from .guard import all_false, never_raises
from .opening import open_store, space
from .pages import LayoutError, PageLayout, layout_name, page_layout
from .prefix_links import PrefixLinks
from .store import GAUGES, Event, Store
from .throttle import Throttle
from .transfer_log import TransferLog

logger = logging.getLogger("cachestore")

_SGLANG_BATCH = 128  # pages of one call at most, but for the hybrid controller's

# SGLang's version of weights that nobody gave one.
_NO_VERSION = "default"


class CacheStore(FlatPages, HiCacheStorage):
    """One rank's backend. SGLang constructs it, registers the host pool, then calls the rest.

    ``storage_config``: SGLang's; its ``extra_config`` holds our settings. The second argument is
    the host pool (as built-in backends get it) or a dict (as `dynamic` ones do); neither is needed.
    Raises `ConfigError` for settings that can't be used.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: Any = None) -> None:
        self.storage_config = storage_config
        self.config = settings.load(storage_config.extra_config)
        self.pipeline, self._pipeline_reason = settings.choose_pipeline(
            self.config, storage_config.is_mla_model
        )
        self.identity: identities.Identity | None = None
        self.registered_pools: dict[Any, Any] = {}
        self._layout: PageLayout | None = None
        self.staged_pages = 0
        self._store: Store | None = None
        self._pool: Any = None
        self._throttle = Throttle(logger)
        self._transfers = TransferLog(enabled=storage_config.enable_storage_metrics)
        self._weights: tuple[int, str] = _weights_now()
        self._links = PrefixLinks(_SGLANG_BATCH)

    # Attach and detach, on the scheduler thread.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn the pool's page layout and open the store for it.

        Raises `ConfigError` or `StoreError`: SGLang then closes this backend and reports it.
        """
        self.close()
        self._weights = _weights_now()
        updates, version = self._weights
        if updates and version == _NO_VERSION:
            raise ConfigError(
                "weight_version",
                version,
                "a version of its own for each update of the weights",
                hint="the weights of this server were updated without one, so that their pages "
                "can't be told from those of the weights before; give one with the next update, "
                "or restart the server",
            )
        if self.storage_config.dcp_size > 1:
            raise ConfigError("dcp_size", self.storage_config.dcp_size, "1 (no DCP)")
        try:
            layout = page_layout(mem_pool_host)
            if not layout.tensor_sizes:
                raise LayoutError("the pool holds no bytes of its own (side pools come later)")
        except LayoutError as error:
            raise ConfigError(
                "hicache_mem_layout", getattr(mem_pool_host, "layout", None), str(error)
            ) from error
        identity = self._identity(mem_pool_host, layout)
        if self.storage_config.is_mla_model and self.storage_config.attn_cp_size > 1:
            logger.warning(
                "CacheStore: SGLang has MLA pages stored by context-parallel rank 0 alone, and "
                "which ranks hold the same is not known: with attention context parallelism "
                "nothing will be restored"
            )
        self._store = open_store(self.config, self.pipeline, identity, layout.tensor_sizes)
        self.identity, self._layout = identity, layout
        self._sizes = np.tile(np.array(layout.tensor_sizes, dtype=np.int64), _SGLANG_BATCH)
        self.mem_pool_host = mem_pool_host
        self._close_before_destroy(mem_pool_host)
        self.staged_pages = 0
        if layout.staged is not None:
            logger.warning(
                "CacheStore: host pools of class %s aren't known, and tell no addresses: their "
                "pages are copied once more on their way (counted as staged_pages)",
                type(mem_pool_host).__name__,
            )
        logger.info(
            "CacheStore: pipeline %s (%s) Pages of %d tokens, %d bytes in %d tensors, layout %s, "
            "in %s as %s; %s",
            self.pipeline,
            self._pipeline_reason,
            layout.page_size,
            layout.page_bytes,
            len(layout.tensor_sizes),
            mem_pool_host.layout,
            ", ".join(self.config.storage_backends),
            identity.directory_name,
            space(self.config),
        )
        self._log_events()

    def _identity(self, pool: Any, layout: PageLayout) -> identities.Identity:
        given = self.storage_config
        arguments = _arguments()
        model = arguments.get("model", {})
        dtype = model_facts.kv_dtype(str(pool.dtype), model, _fp8_kind())
        _, version = self._weights
        return identities.from_parts(
            namespace=self.config.namespace,
            model_path=model_facts.place(model.get("model_path")),
            revision=model_facts.revision(model),
            served_model_name=given.model_name,
            model_identity=self.config.model_identity,
            storage_format_tag=getattr(pool, "storage_format_tag", None),
            dtype=dtype,
            layout=layout_name(pool),
            device_layout=_device_layout(pool),
            page_size=layout.page_size,
            tensor_sizes=layout.tensor_sizes,
            is_mla=given.is_mla_model,
            tp_rank=given.tp_rank,
            tp_size=given.tp_size,
            pp_rank=given.pp_rank,
            pp_size=given.pp_size,
            attn_cp_rank=given.attn_cp_rank,
            attn_cp_size=given.attn_cp_size,
            dcp_rank=given.dcp_rank,
            dcp_size=given.dcp_size,
            should_split_heads=given.should_split_heads,
            tp_lcm_size=given.tp_lcm_size,
            start_layer=getattr(pool, "start_layer", None),
            end_layer=getattr(pool, "end_layer", None),
            variant=model_facts.variant(
                arguments,
                weight_version=None if version == _NO_VERSION else version,
                weights_named=self.config.model_identity is not None,
                plain_kv=model_facts.is_plain(dtype),
                draft_layers=_has_draft_layers(pool),
            ),
        )

    def _open_store(self) -> tuple[Store, identities.Identity, PageLayout] | None:
        """The store and what goes with it; None while detached or after a weight update."""
        store, identity, layout = self._store, self.identity, self._layout
        if store is None or identity is None or layout is None:
            return None
        if self._weights != _weights_now():
            self._throttle.log(
                logging.ERROR,
                "weights updated",
                "CacheStore: the weights were updated since attach, and what is stored is the "
                "old ones': nothing is stored or restored until the backend is attached again",
            )
            return None
        return store, identity, layout

    def _close_before_destroy(self, pool: Any) -> None:
        """Have the store closed before the pool's memory goes.

        On a graceful exit SGLang destroys its host pools before it closes backends
        (Scheduler.release_host_resources), and our threads may be reading them.
        """
        destroy = getattr(pool, "destroy", None)
        if destroy is None:
            return

        @functools.wraps(destroy)
        def close_and_destroy(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return destroy(*args, **kwargs)

        pool.destroy = close_and_destroy
        self._pool = pool

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take note of a pool of the model. Only the KV pool is stored for now.

        A model with more pools is served without hits: see `batch_exists_v2`.
        """
        self.registered_pools[host_pool_name] = host_pool
        if host_pool_name != PoolName.KV:
            logger.error(
                "CacheStore can't store this model's side pool %r yet: no prefix of it will be "
                "restored from storage",
                str(host_pool_name),
            )

    def close(self) -> None:
        """End the store; calls that are waiting return misses. A second call does nothing."""
        store, self._store = self._store, None
        if store is not None:
            counters, events = store.close()
            counters |= self._staged_counter()
            self._log(events)
            said = ", ".join(
                f"{name} {value}"
                for name, value in counters.items()
                if value and name not in GAUGES
            )
            logger.info("CacheStore: closed; counted since attach: %s", said or "nothing")
        pool, self._pool = self._pool, None
        if pool is not None:
            vars(pool).pop("destroy", None)

    # Pages of the KV pool.

    @never_raises(lambda *_, **__: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many of the first pages are stored without a gap."""
        opened = self._open_store()
        if opened is None:
            return 0
        store, identity, _ = opened
        # In growing pieces: most prefixes end at once or not at all, and deriving the ids of
        # keys that don't matter costs as much as looking them up.
        length, piece = 0, 1
        while length < len(keys):
            part = keys[length : length + piece]
            found = store.lookup_prefix(identity.block_ids(part))
            length += found
            if found < len(part):
                break
            piece *= 16
        if self.pipeline == settings.CACHE_POSIX:
            self._links.learn(keys, length)
        return length

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    @never_raises(all_false)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the host pool. One bool a key: False, the page's slots hold anything.

        ``host_indices``: int64 on the CPU, ``len(keys) * page_size``.
        """
        return self._transfer_pool(Store.load, keys, host_indices, extra_info)

    @never_raises(all_false)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages from the host pool. One bool a key; True also if it was stored before."""
        return self._transfer_pool(Store.dump, keys, host_indices, extra_info)

    def _transfer_pool(
        self, move: Callable, keys: list[str], host_indices: torch.Tensor, extra_info: Any
    ) -> list[bool]:
        layout = self._layout
        if layout is not None and layout.staged is not None:
            return self._transfer_staged(move, keys, host_indices, extra_info)
        addresses = None if layout is None else layout.addresses(host_indices, len(keys))
        return self._transfer(move, keys, addresses, extra_info)

    def _transfer(
        self,
        move: Callable,
        keys: Sequence[str],
        addresses: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        opened = self._open_store()
        if opened is None or not keys:
            return [False] * len(keys)
        store, identity, layout = opened
        needed = len(keys) * len(layout.tensor_sizes)
        sizes = self._sizes
        if len(sizes) < needed:
            sizes = np.tile(np.array(layout.tensor_sizes, dtype=np.int64), len(keys))
        started = time.perf_counter()
        parent = self._key_before(keys[0], extra_info)
        parent_id = None if parent is None else identity.block_id(parent)
        codes = move(store, identity.block_ids(keys), addresses, sizes, parent_id)
        seconds = time.perf_counter() - started
        results = [code == Code.OK for code in codes]
        done = sum(results)
        self._transfers.add(move is Store.load, done, done * layout.page_bytes, seconds)
        self._log_events()
        if done < len(codes):
            self._report(move, codes)
        return results

    def _key_before(self, key: str, extra_info: HiCacheStorageExtraInfo | None) -> str | None:
        """The page before ``key``'s: it says what the Cache tier keeps longest."""
        if self.pipeline != settings.CACHE_POSIX:
            return None
        prefix = getattr(extra_info, "prefix_keys", None)
        return prefix[-1] if prefix else self._links.before(key)

    def _report(self, move: Callable, codes: Sequence[int]) -> None:
        bad = [Code(code).name for code in codes if code not in (Code.OK, Code.NOT_FOUND)]
        if bad:
            counts = ", ".join(f"{bad.count(name)} {name}" for name in sorted(set(bad)))
            self._throttle.log(
                logging.WARNING,
                f"{move.__name__}: {sorted(set(bad))}",
                f"{move.__name__} of {len(codes)} pages: {counts}",
            )

    # The calls of models with several pools. Only KV alone can be served for now.

    @never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The restorable prefix: none where a side pool takes part, as none is stored."""
        if any(transfer.name != PoolName.KV for transfer in pool_transfers or ()):
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys), {})

    @never_raises(lambda transfers, *_, **__: _refused(transfers))
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load of side pools: always False."""
        return _refused(transfers)

    @never_raises(lambda transfers, *_, **__: _refused(transfers))
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Dump of side pools: always False."""
        return _refused(transfers)

    # Operation.

    @never_raises(lambda *_, **__: None)
    def clear(self) -> None:
        """Forget this identity's pages, no other's. Returns at once; space is freed behind it."""
        if self._store is not None:
            self._store.clear()
            self._log_events()

    @never_raises(lambda *_, **__: None)
    def get_stats(self) -> Any:
        """What happened since the last call, as SGLang's collector wants it; None without metrics.

        A fresh ``StorageMetrics``: pages, and GB/s, of each batch.
        """
        self._log_events()
        lists = self._transfers.drain()
        return None if lists is None else StorageMetrics(**lists)

    @never_raises(lambda *_, **__: {})
    def counters(self) -> dict[str, int]:
        """The store's counters since attach (``cs_stats`` in c_api.h); empty when detached.

        And ``staged_pages``, of a host pool whose pages have no addresses.
        """
        store = self._store
        return {} if store is None else store.stats() | self._staged_counter()

    def _staged_counter(self) -> dict[str, int]:
        return {"staged_pages": self.staged_pages} if self.staged_pages else {}

    def _log_events(self) -> None:
        store = self._store
        if store is not None:
            with contextlib.suppress(StoreClosed):  # by another thread, just now
                self._log(store.events())

    def _log(self, events: Sequence[Event]) -> None:
        for event in events:
            self._throttle.log(event.level, event.text.split(" ", 2)[0], event.text)


def _refused(transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _arguments() -> dict[str, dict[str, Any]]:
    """What SGLang was told, by namespace, of `model_facts.ARGUMENTS`; nothing outside a server.

    Source: sglang.srt.runtime_context, its bags of resolved ServerArgs.
    """
    try:
        bags = {
            "model": runtime_context.get_model(),
            "moe": runtime_context.get_exec().moe,
            "spec": runtime_context.get_spec(),
        }
    except ValueError:  # not published: a test, or a tool
        return {}
    return {
        space: {name: getattr(bags[space], name, None) for name in names}
        for space, names in model_facts.ARGUMENTS.items()
    }


def _fp8_kind() -> str | None:
    """The FP8 type of this platform, as `float8_e4m3fnuz` of some GPUs."""
    try:
        from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype
    except ImportError:
        return None
    return str(fp8_dtype).removeprefix("torch.")


def _device_layout(pool: Any) -> str | None:
    """The order of what the device pool calls a row, where it isn't token, head, element.

    An MHA host pool keeps the rows as they are, whatever SGLANG_USE_HND_KVCACHE and
    SGLANG_AITER_KV_CACHE_LAYOUT make of them.
    Source: sglang.srt.mem_cache.device_pool_info, KVBufferLayout.
    """
    infos = getattr(pool, "_buffer_infos", None)
    layout = getattr(infos[0].buffers, "layout", None) if infos else None
    return None if layout in (None, KVBufferLayout.NHD) else str(layout.value)


def _has_draft_layers(pool: Any) -> bool:
    """Whether the pool's pages hold layers of a draft model after the target's."""
    layers = getattr(pool, "layer_num", 0)
    return layers > getattr(pool, "target_layer_num", layers)


def _weights_now() -> tuple[int, str]:
    """(updates in place, version) of the weights that are served at present."""
    try:
        version = runtime_context.get_serving().weight_version
    except (ValueError, AttributeError):
        version = None
    return weights.updates, str(version or _NO_VERSION)
