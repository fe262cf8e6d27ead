"""What is measured: CacheStore and SGLang's `file` backend, as SGLang's controller calls them.

`HiCacheController` has two pairs of functions that move a batch of pages: the zero-copy pair,
which it uses with backends like ours, and the generic pair, which it uses with `file`. They are
called here as they are, on a stand-in for the controller that has what they read of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from cachestore_connector.backend import CacheStore

from . import copy_limit
from .cases import PAGE_TOKENS, CacheCase, Case
from .pools import HostPages

FILE_NAMES = ("cachestore", "sglang-file", "raw")  # of the cases with files
CACHE_NAMES = ("cachestore", copy_limit.MEMCPY, copy_limit.STREAMING)  # of those with a cache
NAMES = (*FILE_NAMES, *CACHE_NAMES[1:], "lru")  # lru: of the request traces


class Subject(Protocol):
    """Dumps the source pages under given keys, loads them into the target pages, looks them up.

    ``name`` is one of `FILE_NAMES`; ``variant`` tells apart subjects of one name, of which the best
    counts. Each call takes one key a page and answers how many pages, from the first on, went
    well or are there. ``prepare`` comes before it with the same keys, and isn't counted.
    """

    name: str
    variant: str

    def prepare(self, keys: Sequence[str]) -> None: ...  # noqa: D102
    def dump(self, keys: Sequence[str]) -> int: ...  # noqa: D102
    def load(self, keys: Sequence[str]) -> int: ...  # noqa: D102
    def lookup(self, keys: Sequence[str]) -> int: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class _Operation:
    """What the functions that load read of a prefetch operation."""

    request_id = "benchmark"

    @staticmethod
    def is_terminated() -> bool:
        return False


class Backend:
    """A storage backend under the functions of SGLang's controller, in batches of its size.

    Also the stand-in for the controller: the attributes without an underscore are what those
    functions read.
    """

    variant = ""

    def __init__(
        self,
        name: str,
        backend: HiCacheStorage,
        pages: HostPages,
        page_set: Callable[..., bool],
        page_get: Callable[..., int],
    ) -> None:
        """``page_set``, ``page_get``: the pair that SGLang uses with this backend."""
        self.name = name
        self.storage_backend = backend
        self.storage_host_pool = pages.pool
        self.page_size = PAGE_TOKENS
        self._pages = pages
        self._set, self._get = page_set, page_get
        backend.register_mem_pool_host(pages.pool)

    @staticmethod
    def _batches(keys: Sequence[str], slots: torch.Tensor) -> Any:
        for first in range(0, len(keys), STORAGE_BATCH_SIZE):
            batch = list(keys[first : first + STORAGE_BATCH_SIZE])
            yield batch, slots[first * PAGE_TOKENS : (first + len(batch)) * PAGE_TOKENS]

    def prepare(self, keys: Sequence[str]) -> None:
        """Nothing: what it takes is counted."""

    def dump(self, keys: Sequence[str]) -> int:
        """As `HiCacheController._page_backup`."""
        done = 0
        for batch, slots in self._batches(keys, self._pages.source):
            if not self._set(self, batch, slots, HiCacheStorageExtraInfo()):
                break
            done += len(batch)
        return done

    def load(self, keys: Sequence[str]) -> int:
        """As `HiCacheController._page_transfer`."""
        done = 0
        for batch, slots in self._batches(keys, self._pages.target):
            hits = self._get(self, _Operation, batch, slots, HiCacheStorageExtraInfo())
            done += hits
            if hits < len(batch):
                break
        return done

    def lookup(self, keys: Sequence[str]) -> int:
        """As `HiCacheController._storage_hit_query`."""
        found = 0
        for batch, _ in self._batches(keys, self._pages.source):
            hits = self.storage_backend.batch_exists(batch, HiCacheStorageExtraInfo())
            found += hits
            if hits < len(batch):
                break
        return found

    def close(self) -> None:
        """Detach; the pool stays."""
        close = getattr(self.storage_backend, "close", None)
        if close is not None:
            close()


def cachestore(
    case: Case | CacheCase, pages: HostPages, directory: str, settings: Mapping[str, Any]
) -> Backend:
    """CacheStore with its defaults, but for ``settings`` (which win) and what the case asks for.

    Without ``store_pipeline`` there it is Posix, for MLA too: most cases are of files.
    """
    extra = {
        "storage_backends": [directory],
        "model_identity": "benchmark",
        "store_pipeline": "Posix",
        "io_direct": case.direct,
        **settings,
    }
    # Its file of settings may hold anything: it isn't what is measured.
    given = os.environ.pop("CACHESTORE_CONFIG", None)
    try:
        backend = CacheStore(_storage_config(case, extra), {})
    finally:
        if given is not None:
            os.environ["CACHESTORE_CONFIG"] = given
    return Backend(
        "cachestore",
        backend,
        pages,
        HiCacheController._page_set_zero_copy,
        HiCacheController._page_get_zero_copy,
    )


def sglang_file(case: Case, pages: HostPages, directory: str) -> Backend:
    """SGLang's `file` backend with its defaults."""
    # This variable would win over the directory given.
    given = os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
    try:
        backend = HiCacheFile(_storage_config(case, None), directory)
    finally:
        if given is not None:
            os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = given
    return Backend(
        "sglang-file",
        backend,
        pages,
        HiCacheController._generic_page_set,
        HiCacheController._generic_page_get,
    )


def _storage_config(case: Case | CacheCase, extra: dict[str, Any] | None) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=case.model.is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="benchmark",
        extra_config=extra,
    )
