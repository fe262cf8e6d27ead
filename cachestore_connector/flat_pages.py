"""Whole flat pages: SGLang's legacy calls, and pools that only SGLang can copy pages of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .guard import all_none, never_raises
from .pages import PageLayout
from .pools import Pool
from .store import Store

# Pages that are copied before they are transferred: bounds what the copies take.
_STAGED_AT_ONCE = 16


class FlatPages:
    """`get`, `set` and their batches, for a backend that transfers tensors by their addresses.

    The pages are the same blocks as those of the calls without copies: a flat page's tensors are
    found by `PageLayout.flat_addresses`.

    ``staged_pages``: how many were copied through flat pages, for want of addresses.
    """

    staged_pages: int
    _counting = threading.Lock()  # loads and dumps come from threads of their own
    _layout: PageLayout | None
    _transfer: Callable[..., list[bool]]
    _transfer_kv: Callable[..., list[bool]]

    @never_raises(all_none)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load flat pages into the given tensors (or new ones); None for each that can't be."""
        if self._layout is None:
            return [None] * len(keys)
        if target_locations is None:
            size = self._layout.page_bytes
            target_locations = [torch.empty(size, dtype=torch.uint8) for _ in keys]
        addresses = _flat_addresses(self._layout, keys, target_locations)
        results = self._transfer_kv(Store.load, keys, addresses)
        return [page if ok else None for page, ok in zip(target_locations, results, strict=True)]

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load one flat page: `batch_get` of one."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    @never_raises(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages from tensors. True if every one is stored."""
        pages = values if values is not None else target_locations
        if pages is None or self._layout is None:
            return False
        pages = [page.contiguous() for page in pages]
        addresses = _flat_addresses(self._layout, keys, pages)
        return all(self._transfer_kv(Store.dump, keys, addresses))

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store one flat page: `batch_set` of one."""
        page = value if value is not None else target_location
        return page is not None and self.batch_set([key], [page])

    def _transfer_staged(
        self,
        move: Callable,
        pool: Pool,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: Any,
    ) -> list[bool]:
        """Load or dump pages of a pool by copies of them, some at a time."""
        layout, host_pool = pool.layout, pool.host_pool
        assert layout.staged is not None
        slots = layout.first_slots(host_indices, len(keys)).tolist()
        results: list[bool] = []
        for first in range(0, len(keys), _STAGED_AT_ONCE):
            part = slice(first, first + _STAGED_AT_ONCE)
            if first:  # the page before this part's, for the next part as for the whole
                extra_info = SimpleNamespace(prefix_keys=[keys[first - 1]])
            if move is Store.dump:
                pages = [
                    host_pool.get_data_page(slot, flat=True).contiguous() for slot in slots[part]
                ]
            else:
                pages = [torch.empty(layout.page_bytes, dtype=torch.uint8) for _ in slots[part]]
            addresses = _flat_addresses(layout, keys[part], pages)
            done = self._transfer(move, pool, keys[part], addresses, extra_info)
            if move is Store.load:
                for slot, page, ok in zip(slots[part], pages, done, strict=True):
                    if ok:
                        host_pool.set_from_flat_data_page(slot, page.view(layout.staged))
            with self._counting:
                self.staged_pages += sum(done)
            results += done
        return results


def _flat_addresses(
    layout: PageLayout, keys: Sequence[str], pages: Sequence[torch.Tensor]
) -> np.ndarray:
    if len(pages) != len(keys):
        raise ValueError(f"{len(keys)} keys and {len(pages)} pages")
    table: list[int] = []
    for page in pages:
        if page.device.type != "cpu" or not page.is_contiguous():
            raise ValueError("a flat page must be a contiguous tensor on the CPU")
        if page.nbytes != layout.page_bytes:
            raise ValueError(
                f"a flat page has {layout.page_bytes} bytes here, got one of {page.nbytes}"
            )
        table += layout.flat_addresses(page.data_ptr())
    return np.array(table, dtype=np.int64).reshape(len(pages), len(layout.tensor_sizes))
