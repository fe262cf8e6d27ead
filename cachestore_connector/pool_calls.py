"""Lookups, loads and dumps of an open store's pools, as SGLang calls for them.

One bool a key and pool, True only for bytes that are there. A prefix is reported only as far as
every pool that takes part can serve it, by SGLang's rules (`prefix_hits`); each call asks anew, so
that what was evicted or damaged since isn't promised.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from .errors import Code, StoreClosed
from .guard import all_false, never_raises
from .identity import BLOCK_ID_BYTES
from .page_counts import DUMP, LOAD
from .pages import PageLayout
from .pools import KV, Pool, default_policy
from .prefix_hits import ALL_PAGES, PoolPages, PrefixHits, prefix_hits
from .prefix_links import PrefixLinks
from .reports import Reports
from .store import Store
from .throttle import Throttle
from .transfer_log import TransferLog

logger = logging.getLogger("cachestore")

_SHOWN_KEY = 12  # characters of a key in the log


def _transfer_false(_: Any, transfer: PoolTransfer, *__: Any) -> list[bool]:
    keys = transfer.keys
    return [False] * len(keys) if isinstance(keys, Sized) else []


def _all_false(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict:
    known = transfers if isinstance(transfers, list | tuple) else ()
    return {
        transfer.name: _transfer_false(None, transfer)
        for transfer in known
        if isinstance(transfer, PoolTransfer)
    }


class PoolCalls:
    """SGLang's calls for pages. ``_pools``: the open ones by name, replaced when one is added."""

    registered_pools: dict[Any, Any]
    _layout: PageLayout | None  # the anchor's; without tensors: KV has no bytes of its own
    _pools: Mapping[str, Pool]
    _links: PrefixLinks | None  # with a Cache tier only
    _asked: dict[str, tuple[str, int, int, int]]  # what SGLang asked of a side pool
    _throttle: Throttle
    _transfers: TransferLog
    _reports: Reports | None  # while the store is open
    _open_store: Callable[[], Store | None]
    _log_events: Callable[[], None]
    _transfer_staged: Callable[..., list[bool]]

    # Lookups.

    @never_raises(lambda *_, **__: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many of the first pages can be restored: KV, and what else SGLang asked for with it.

        SGLang's PD decode asks so for models with side pools too, and relies on the answer.
        """
        names = {*self._pools, *map(str, self.registered_pools)} - {KV}
        wanted = [(name, *self._asked.get(name, _unasked(name))) for name in sorted(names)]
        return self._prefix_hits(keys, wanted).kv_hit_pages

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    @never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Every prefix that KV and the pools of ``pool_transfers`` can serve together."""
        side = [transfer for transfer in pool_transfers or () if transfer.name != PoolName.KV]
        wanted = [(transfer.name, *self._note_asked(transfer)) for transfer in side]
        hits = self._prefix_hits(keys, wanted)
        return PoolTransferResult(
            hits.kv_hit_pages, hits.extra_pool_hit_pages, hits.restorable_prefix_pages
        )

    def _note_asked(self, transfer: PoolTransfer) -> tuple[str, int, int, int]:
        policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
        window = max(1, len(transfer.keys or ()))
        asked = (policy, window, transfer.block_pages, transfer.group_pages)
        name = str(transfer.name)
        before = self._asked.get(name)
        # A short prompt asks for less than the whole window.
        most = max(window, before[1]) if before is not None and before[0] == policy else window
        self._asked[name] = (policy, most, *asked[2:])
        return asked

    def _prefix_hits(
        self, keys: Sequence[str], wanted: Sequence[tuple[str, str, int, int, int]]
    ) -> PrefixHits:
        store, pools, layout = self._open_store(), self._pools, self._layout
        if store is None or layout is None or not pools or not keys:
            return PrefixHits(0, {}, [])
        reports, started = self._reports, time.perf_counter()
        hits = self._look(store, pools, layout, keys, wanted)
        seconds = time.perf_counter() - started
        if reports is not None:
            reports.looked(len(keys), hits.kv_hit_pages, seconds)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "CacheStore: lookup of %d pages, %s: %d can be restored; %.2f ms",
                len(keys),
                _key_range(keys),
                hits.kv_hit_pages,
                seconds * 1000,
            )
        return hits

    def _look(
        self,
        store: Store,
        pools: Mapping[str, Pool],
        layout: PageLayout,
        keys: Sequence[str],
        wanted: Sequence[tuple[str, str, int, int, int]],
    ) -> PrefixHits:
        if layout.tensor_sizes:
            length, ids = self._kv_run(store, pools[KV], keys)
        else:
            # Nothing of KV is missing where it has no bytes.
            length = len(keys)
            ids = next(iter(pools.values())).identity.block_ids(keys)
        ids = ids[: BLOCK_ID_BYTES * length]
        sides = (
            _look_in(store, pools.get(str(name)), ids, name, *asked) for name, *asked in wanted
        )
        return prefix_hits(length, sides, kv_name=PoolName.KV)

    def _kv_run(self, store: Store, pool: Pool, keys: Sequence[str]) -> tuple[int, bytes]:
        """How many of the first pages have their KV, and the ids of those and maybe more."""
        # In growing pieces: most prefixes end at once or not at all, and deriving the ids of
        # keys that don't matter costs as much as looking them up.
        length, piece, ids = 0, 1, b""
        while length < len(keys):
            part = keys[length : length + piece]
            more = pool.identity.block_ids(part)
            ids += more
            found = pool.lookup_prefix(store, more)
            length += found
            if found < len(part):
                break
            piece *= 16
        if self._links is not None:
            self._links.learn(keys, length)
        return length, ids

    # Transfers.

    @never_raises(all_false)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the KV pool. One bool a key: False, the page's slots hold anything.

        ``host_indices``: int64 on the CPU, ``len(keys) * page_size``.
        """
        return self._move_kv(Store.load, keys, host_indices, extra_info)

    @never_raises(all_false)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages from the KV pool. One bool a key; True also if it was stored before."""
        return self._move_kv(Store.dump, keys, host_indices, extra_info)

    @never_raises(_all_false)
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load pages into the pools that are named: one bool for each key of each transfer."""
        return self._move_pools(Store.load, transfers, extra_info)

    @never_raises(_all_false)
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages from the pools that are named, as `batch_get_v2` does the reverse."""
        return self._move_pools(Store.dump, transfers, extra_info)

    def _move_pools(
        self, move: Callable, transfers: Sequence[PoolTransfer], extra_info: Any
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._move_pool(move, transfer, extra_info)
            for transfer in transfers or ()
        }

    @never_raises(_transfer_false)
    def _move_pool(self, move: Callable, transfer: PoolTransfer, extra_info: Any) -> list[bool]:
        keys, indices = transfer.keys or [], transfer.host_indices
        if not keys:
            return []
        if indices is None:
            return [False] * len(keys)
        if transfer.name == PoolName.KV:
            return self._move_kv(move, keys, indices, extra_info)
        pool = self._pools.get(str(transfer.name))
        if pool is None:
            return [False] * len(keys)
        store = self._open_store()
        if move is Store.dump and not pool.writes and store is not None:
            # Another rank holds the same and stores it; this one says what is there.
            return pool.lookup(store, pool.identity.block_ids(keys)).tolist()
        return self._transfer_slots(move, pool, keys, indices, extra_info)

    def _move_kv(
        self, move: Callable, keys: Sequence[str], indices: torch.Tensor, extra_info: Any
    ) -> list[bool]:
        pool, layout = self._pools.get(KV), self._layout
        if pool is not None:
            return self._transfer_slots(move, pool, keys, indices, extra_info)
        if layout is None:
            return [False] * len(keys)
        return self._transfer_kv(move, keys, layout.addresses(indices, len(keys)), extra_info)

    def _transfer_kv(
        self, move: Callable, keys: Sequence[str], addresses: np.ndarray, extra_info: Any = None
    ) -> list[bool]:
        """Of the anchor's pages. Where those have no bytes all of them are there at once."""
        pool = self._pools.get(KV)
        if pool is not None:
            return self._transfer(move, pool, keys, addresses, extra_info)
        logical = self._layout is not None and not self._layout.tensor_sizes
        return [logical and self._open_store() is not None] * len(keys)

    def _transfer_slots(
        self,
        move: Callable,
        pool: Pool,
        keys: Sequence[str],
        indices: torch.Tensor,
        extra_info: Any,
    ) -> list[bool]:
        if pool.layout.staged is not None:
            return self._transfer_staged(move, pool, keys, indices, extra_info)
        began = time.perf_counter()
        addresses = pool.layout.addresses(indices, len(keys))
        return self._transfer(move, pool, keys, addresses, extra_info, began)

    def _transfer(
        self,
        move: Callable,
        pool: Pool,
        keys: Sequence[str],
        addresses: np.ndarray,
        extra_info: HiCacheStorageExtraInfo | None,
        began: float | None = None,
    ) -> list[bool]:
        """``began``: when computing the addresses did (`time.perf_counter`), if it was now."""
        store, reports = self._open_store(), self._reports
        if store is None or not keys:
            return [False] * len(keys)
        direction = LOAD if move is Store.load else DUMP
        started = time.perf_counter()
        # Only the first pool has a cache, which wants to know.
        parent = self._key_before(keys[0], extra_info) if pool.number == 0 else None
        parent_id = None if parent is None else pool.identity.block_id(parent)
        ids = pool.identity.block_ids(keys)
        moving = time.perf_counter()
        codes: Sequence[int] = [Code.INTERNAL] * len(keys)
        try:
            codes = pool.move(move, store, ids, addresses, parent_id)
        except StoreClosed:  # and nothing was done
            codes = [Code.CLOSED] * len(keys)
            raise
        finally:
            ended = time.perf_counter()
            if reports is not None:
                page_bytes = pool.layout.page_bytes
                reports.moved(pool.name, direction, codes, page_bytes, ended - started)
        results = [code == Code.OK for code in codes]
        done = sum(results)
        size = done * pool.layout.page_bytes
        if pool.number == 0:  # SGLang counts pages, not what belongs to them
            self._transfers.add(move is Store.load, done, size, ended - started)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "CacheStore: %s of %d pages of %s, %s: %d done, %d bytes; %s",
                direction,
                len(keys),
                pool.name,
                _key_range(keys),
                done,
                size,
                _stages(began, started, moving, ended),
            )
        self._log_events()
        if done < len(codes):
            self._report(move, pool, codes)
        return results

    def _key_before(self, key: str, extra_info: HiCacheStorageExtraInfo | None) -> str | None:
        """The page before ``key``'s: it says what the Cache tier keeps longest."""
        if self._links is None:
            return None
        prefix = getattr(extra_info, "prefix_keys", None)
        return prefix[-1] if prefix else self._links.before(key)

    def _report(self, move: Callable, pool: Pool, codes: Sequence[int]) -> None:
        bad = [Code(code).name for code in codes if code not in (Code.OK, Code.NOT_FOUND)]
        if bad:
            kinds = sorted(set(bad))
            counts = ", ".join(f"{bad.count(name)} {name}" for name in kinds)
            of = "" if pool.name == KV else f" of pool {pool.name}"
            self._throttle.log(
                logging.WARNING,
                f"{move.__name__}{of}: {kinds}",
                f"{move.__name__} of {len(codes)} pages{of}: {counts}",
            )


def _key_range(keys: Sequence[str]) -> str:
    """The first and the last key, as much of them as tells them apart."""
    first, last = str(keys[0])[:_SHOWN_KEY], str(keys[-1])[:_SHOWN_KEY]
    return first if len(keys) == 1 else f"{first}..{last}"


def _stages(began: float | None, started: float, moving: float, ended: float) -> str:
    """What the stages of a transfer took. ``began``: None where addresses weren't computed."""
    stages = {"block ids": moving - started, "transfer": ended - moving}
    if began is not None:
        stages = {"addresses": started - began} | stages
    return ", ".join(f"{stage} {seconds * 1000:.2f} ms" for stage, seconds in stages.items())


def _unasked(name: str) -> tuple[str, int, int, int]:
    # Nobody has said how long a window is: all of it is enough. A state is one page.
    return (default_policy(name), 1 if name == PoolName.MAMBA else sys.maxsize, 0, 0)


def _look_in(
    store: Store,
    pool: Pool | None,
    ids: bytes,
    name: str,
    policy: str,
    window: int,
    block_pages: int,
    group_pages: int,
) -> PoolPages:
    """Which of these pages a pool has: none if it isn't open."""
    present: Any = ()
    if pool is not None and policy == ALL_PAGES:
        present = np.ones(pool.lookup_prefix(store, ids), dtype=bool)
    elif pool is not None:
        present = pool.lookup(store, ids)
    return PoolPages(name, policy, present, window, block_pages, group_pages)
