"""The legacy calls: whole flat pages, as SGLang's generic path and older releases make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .guard import all_none, never_raises
from .pages import PageLayout
from .store import Store


class FlatPages:
    """`get`, `set` and their batches, for a backend that transfers tensors by their addresses.

    The pages are the same blocks as those of the calls without copies: a flat page's tensors are
    found by `PageLayout.flat_addresses`.
    """

    _layout: PageLayout | None
    _transfer: Callable[..., list[bool]]

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
        results = self._transfer(Store.load, keys, self._flat_addresses(keys, target_locations))
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
        return all(self._transfer(Store.dump, keys, self._flat_addresses(keys, pages)))

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

    def _flat_addresses(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> Any:
        layout = self._layout
        assert layout is not None
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
        return np.array(table, dtype=np.int64)
