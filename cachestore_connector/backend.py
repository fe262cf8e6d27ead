"""`CacheStore`: SGLang's HiCacheStorage interface on the native store.

Once attached, nothing here raises into SGLang: its storage threads end with the first exception.
A call that can't be served answers with misses or False, is counted, and is logged at a bounded
rate. What is wrong with the settings or the host pool is raised at attach, where SGLang reports it.

Threads (SGLang 0.5.23): lookups come from the prefetch thread, loads from the prefetch I/O thread,
dumps from the backup thread, the rest from the scheduler. All may come at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from . import config as settings
from . import identity as identities
from . import log_level, model_facts, ranks, summary, weights
from .context_ranks import stores_shared
from .errors import CacheStoreError, ConfigError, StoreClosed
from .flat_pages import FlatPages
from .guard import never_raises
from .opening import open_pool, open_store
from .pages import LayoutError, PageLayout, page_layout
from .pool_calls import PoolCalls
from .pools import SGLANG_BATCH, Part, Pool, chunks_of, identity_of, is_trailing
from .prefix_links import PrefixLinks
from .reports import Reports
from .store import GAUGES, Event, Store
from .throttle import Throttle
from .transfer_log import TransferLog

logger = logging.getLogger("cachestore")

# SGLang's version of weights that nobody gave one.
_NO_VERSION = "default"


class CacheStore(PoolCalls, FlatPages, HiCacheStorage):
    """One rank's backend. SGLang constructs it, registers the host pools, then calls the rest.

    ``storage_config``: SGLang's; its ``extra_config`` holds our settings. The second argument is
    the host pool (as built-in backends get it) or a dict (as `dynamic` ones do); neither is needed.
    ``host_pools``: all pools that will be registered, (name, pool); None where they aren't known.
    Raises `ConfigError` for settings that can't be used.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        _: Any = None,
        *,
        host_pools: Sequence[tuple[str, Any]] | None = None,
    ) -> None:
        log_level.apply()
        self.storage_config = storage_config
        self.config = settings.load(storage_config.extra_config)
        self.pipeline, self._pipeline_reason = settings.choose_pipeline(
            self.config, storage_config.is_mla_model
        )
        self.identity: identities.Identity | None = None  # of the store's first pool
        self.registered_pools: dict[Any, Any] = {}
        self._host_pools = host_pools
        self._layout: PageLayout | None = None
        self._family = ""
        self.staged_pages = 0
        self._store: Store | None = None
        self._reports: Reports | None = None  # while the store is open
        self._pools: dict[str, Pool] = {}
        self._unsaid: list[Pool] = []  # opened, and not in the log yet
        self._waiting: list[tuple[str, Any]] = []  # until the store can be opened
        self._watched: list[Any] = []  # pools whose `destroy` is ours
        self._asked: dict[str, tuple[str, int, int, int]] = {}
        self._throttle = Throttle(logger)
        self._transfers = TransferLog(enabled=storage_config.enable_storage_metrics)
        self._weights: tuple[int, str] = _weights_now()
        self._links = PrefixLinks(SGLANG_BATCH) if self.pipeline == settings.CACHE_POSIX else None

    # Attach and detach, on the scheduler thread.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn the pools' page layouts and open the store for them.

        That is, for this one, the anchor, and for all others that are known by now. Where the
        anchor has no bytes, the first pool that has some takes its place.
        Raises `ConfigError` or `StoreError`: SGLang then closes this backend and reports it.
        """
        self.close()
        self.registered_pools, self.staged_pages = {}, 0
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
        layout = self._page_layout(mem_pool_host, PoolName.KV)
        known = [(name, pool) for name, pool in self._host_pools or () if name != PoolName.KV]
        if not layout.tensor_sizes and self._host_pools is not None and not known:
            raise ConfigError(
                "hicache_mem_layout",
                mem_pool_host.layout,
                "a host pool with bytes",
                hint=f"host pool {type(mem_pool_host).__name__} holds no bytes of its own",
            )
        parts = self._parts(mem_pool_host, layout, PoolName.KV)
        contexts = self.storage_config.is_mla_model and self.storage_config.attn_cp_size > 1
        if contexts and self._host_pools is None and not ranks.same_on_contexts(mem_pool_host):
            logger.error(
                "CacheStore: each context-parallel rank may hold other bytes, and without the "
                "plugin's hooks SGLang has one of them store: nothing will be restored"
            )
        self._layout, self._family = layout, parts[0].identity.family
        self.mem_pool_host = mem_pool_host
        try:
            if layout.tensor_sizes:
                self._open(mem_pool_host, PoolName.KV.value, layout, parts)
            self._open_all(known)
        except BaseException:
            self.close()
            raise
        self._say_opened()
        self._close_before_destroy(mem_pool_host)
        if not self._pools:
            logger.info("CacheStore: waiting for a host pool that holds bytes")
        self._log_events()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Store a pool of the model too; also one that comes late, while the store is in use.

        Never raises, as SGLang would be left half attached: with a pool that can't be stored,
        nothing is restored (`PoolCalls.batch_exists`), and the log says why.
        """
        name = str(host_pool_name)
        self.registered_pools[host_pool_name] = host_pool
        known = self._pools.get(name)
        if name == PoolName.KV or self._layout is None or self._is_open(known, host_pool):
            return
        self._waiting.append((name, host_pool))
        # The store's first pool should be one that has every page: when a block of it is used, all
        # that belongs to the page counts as used.
        if self._store is not None or not is_trailing(name):
            self._open_waiting()

    def on_host_pools_registered(self) -> None:
        """Store those too that waited for a better one to come first."""
        self._open_waiting()

    @staticmethod
    def _is_open(pool: Pool | None, host_pool: Any) -> bool:
        return pool is not None and pool.host_pool is host_pool

    def _open_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for name, host_pool in _leaders_first(waiting):
            try:
                self._open_all([(name, host_pool)])
            except Exception as error:
                logger.error(
                    "CacheStore can't store this model's side pool %r: no prefix that needs it "
                    "will be restored from storage: %s",
                    name,
                    error,
                    exc_info=not isinstance(error, CacheStoreError),
                )
        self._say_opened()
        self._log_events()

    def _open_all(self, host_pools: Sequence[tuple[str, Any]]) -> None:
        """Open a pool of the store for each. Nothing is opened if the pages of one can't be."""
        layouts = [
            (name, pool, self._page_layout(pool, name)) for name, pool in _leaders_first(host_pools)
        ]
        for name, pool, layout in layouts:
            if not layout.tensor_sizes:
                raise ConfigError(
                    "hicache_mem_layout",
                    pool.layout,
                    "a host pool with bytes",
                    hint=f"the {name} pool holds none of its own",
                )
        for name, pool, layout in layouts:
            self._open(pool, name, layout, self._parts(pool, layout, name, self._family))
            self._close_before_destroy(pool)

    def _open(self, host_pool: Any, name: str, layout: PageLayout, parts: tuple[Part, ...]) -> None:
        kind, is_mla = type(host_pool).__name__, self.storage_config.is_mla_model
        known = self._pools.get(name)
        if known is not None and known.identity == parts[0].identity:
            parts = known.parts  # other slots for the same pages
        else:
            parts = tuple(dataclasses.replace(p, number=self._open_part(p)) for p in parts)
        stores = ranks.every_rank_stores(name, kind, is_mla)
        # Of MLA models SGLang asks only whoever is to store.
        writes = stores or is_mla or stores_shared(self.storage_config)
        pool = Pool(name, host_pool, layout, parts, stores, writes)
        self._pools = {**self._pools, name: pool}
        self._unsaid.append(pool)
        if self._reports is None:
            self.identity = pool.identity
            self._reports = self._begin_reports(self._store, pool.identity.directory_name)
        self._reports.add_pool(name)
        unhooked = self._host_pools is None and self.storage_config.tp_size > 1
        if unhooked and ranks.needs_hook(name, kind, is_mla):
            logger.error(
                "CacheStore: each rank has other bytes in the %s pool, and SGLang has rank 0 "
                "alone store it without the plugin's hooks: nothing will be restored",
                name,
            )
        if layout.staged is not None:
            logger.warning(
                "CacheStore: host pools of class %s aren't known, and tell no addresses: their "
                "pages are copied once more on their way (counted as staged_pages)",
                kind,
            )

    def _begin_reports(self, store: Store, identity: str) -> Reports:
        reports = Reports(
            lambda: store.stats() | self._staged_counter(),
            given=self.storage_config,
            config=self.config,
            pipeline=self.pipeline,
            identity=identity,
            throttle=self._throttle,
        )
        reports.start()
        return reports

    def _say_opened(self) -> None:
        """Log what was opened since the last time: all of an attach at once."""
        pools, self._unsaid = self._unsaid, []
        store = self._store
        if not pools or store is None:
            return
        if pools[0].number != 0:
            for pool in pools:
                logger.info("CacheStore: %s", summary.of_pool(pool))
            return
        events = store.events()
        logger.info(
            "CacheStore: %s",
            summary.of_attach(
                self.pipeline, self._pipeline_reason, pools, self.config, store.stats(), events
            ),
        )
        self._log([event for event in events if not summary.has(event)])

    def _open_part(self, part: Part) -> int:
        """Open the store for it, or a further pool of the store: the pool's number."""
        if self._store is None:
            self._store = open_store(self.config, self.pipeline, part.identity, part.tensor_sizes)
            return 0
        return open_pool(self._store, self.config, self.pipeline, part.identity, part.tensor_sizes)

    def every_rank_stores(self, name: Any) -> bool:
        """Whether a side pool is to be stored by ranks that SGLang has store no KV."""
        pool = self._pools.get(str(name))
        return pool is not None and pool.every_rank_stores

    def _page_layout(self, pool: Any, name: str) -> PageLayout:
        """Raises `ConfigError` for pages that can't be stored."""
        try:
            return page_layout(pool, max(1, chunks_of(pool, str(name), self.storage_config)))
        except LayoutError as error:
            what = str(error) if name == PoolName.KV else f"{name}: {error}"
            raise ConfigError("hicache_mem_layout", getattr(pool, "layout", None), what) from error

    def _parts(
        self, pool: Any, layout: PageLayout, name: str, family: str = ""
    ) -> tuple[Part, ...]:
        """What is stored by itself of a host pool's pages; without the store's numbers."""
        _, version = self._weights

        def part(first: int, of_part: PageLayout, chunk: int | None) -> Part:
            identity = identity_of(
                pool,
                of_part,
                self.storage_config,
                self.config,
                _arguments(),
                name=str(name),
                family=family,
                chunk=chunk,
                fp8_kind=_fp8_kind(),
                weight_version=None if version == _NO_VERSION else version,
            )
            return Part(first, of_part.tensor_sizes, identity, 0)

        chunks = chunks_of(pool, str(name), self.storage_config)
        if chunks == 0:
            return (part(0, layout, None),)
        share = len(layout.tensor_sizes) // chunks
        return tuple(part(share * i, layout.chunk(i, chunks), i) for i in range(chunks))

    def _open_store(self) -> Store | None:
        """The store; None while detached or after a weight update."""
        store = self._store
        if store is not None and self._weights != _weights_now():
            self._throttle.log(
                logging.ERROR,
                "weights updated",
                "CacheStore: the weights were updated since attach, and what is stored is the "
                "old ones': nothing is stored or restored until the backend is attached again",
            )
            return None
        return store

    def _close_before_destroy(self, pool: Any) -> None:
        """Have the store closed before the pool's memory goes.

        On a graceful exit SGLang destroys its host pools before it closes backends
        (Scheduler.release_host_resources), and our threads may be reading them.
        """
        destroy = getattr(pool, "destroy", None)
        if destroy is None or any(watched is pool for watched in self._watched):
            return

        @functools.wraps(destroy)
        def close_and_destroy(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return destroy(*args, **kwargs)

        pool.destroy = close_and_destroy
        self._watched.append(pool)

    def close(self) -> None:
        """End the store; calls that are waiting return misses. A second call does nothing."""
        store, self._store = self._store, None
        reports, self._reports = self._reports, None
        self._pools, self._waiting, self._layout, self._unsaid = {}, [], None, []
        if reports is not None:
            reports.stop()
        if store is not None:
            counters: dict[str, int] = {}
            try:
                counters, events = store.close()
                counters |= self._staged_counter()
            finally:
                if reports is not None:
                    reports.finish(counters)
            self._log(events)
            said = ", ".join(
                f"{name} {value}"
                for name, value in counters.items()
                if value and name not in GAUGES
            )
            self._throttle.tell_left_out()
            logger.info("CacheStore: closed; counted since attach: %s", said or "nothing")
        watched, self._watched = self._watched, []
        for pool in watched:
            vars(pool).pop("destroy", None)

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

        And ``staged_pages``, of host pools whose pages have no addresses.
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


def _leaders_first(host_pools: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Pools that have every page before those that have some."""
    return sorted(host_pools, key=lambda pool: is_trailing(pool[0]))


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


def _weights_now() -> tuple[int, str]:
    """(updates in place, version) of the weights that are served at present."""
    try:
        version = runtime_context.get_serving().weight_version
    except (ValueError, AttributeError):
        version = None
    return weights.updates, str(version or _NO_VERSION)
