"""Page layouts: from SGLang's host indices to the addresses and sizes of a page's tensors.

Host pools are plain arrays, so the address of a tensor is linear in the page number; `PageLayout`
knows base and stride of each tensor and computes a batch in one array operation. Both are those of
`pool_tensors`; what the pool tells itself (``get_page_buffer_meta``, in a Python loop over pages
and layers) checks them once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import torch

from .pool_tensors import LayoutError, Offers, asking, page_count, tensors_of

__all__ = ["LayoutError", "PageLayout", "layout_name", "page_layout"]


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Where the tensors of a host pool's pages lie. Immutable; safe between threads.

    ``page_size``: tokens. ``page_count``: pages of the pool. ``tensor_sizes``: bytes, in the
    pool's own order. ``bases``, ``strides``: int64, one number per tensor: its address
    in page 0, and from one page to the next. ``flat_order``: the order of the tensors in SGLang's
    flat page (``get_data_page``), a slice of the pool's buffer: by address. For layer_first
    that is all K layers, then all V layers, while the tensors alternate. None where SGLang has no
    flat page.

    ``staged``: the type of the flat pages of a pool that nobody else can find the bytes of. Then
    the flat page is the one tensor, without addresses: the pool itself copies its pages.
    """

    page_size: int
    page_count: int
    tensor_sizes: tuple[int, ...]
    bases: np.ndarray
    strides: np.ndarray
    flat_order: tuple[int, ...] | None
    staged: torch.dtype | None = None

    def chunk(self, number: int, chunks: int) -> PageLayout:
        """One of ``chunks`` equal shares of a page's tensors, without a flat page.

        Of a page that is split by heads: K and V of some of the heads.
        """
        share = len(self.tensor_sizes) // chunks
        mine = slice(number * share, (number + 1) * share)
        return dataclasses.replace(
            self,
            tensor_sizes=self.tensor_sizes[mine],
            bases=self.bases[mine],
            strides=self.strides[mine],
            flat_order=None,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all tensors."""
        return sum(self.tensor_sizes)

    def first_slots(self, host_indices: torch.Tensor, pages: int) -> np.ndarray:
        """The first slot of each of ``pages`` pages: int64.

        ``host_indices``: int64 on the CPU, ``pages * page_size`` token slots, each page's from
        its first slot on. Raises ValueError for anything else.
        """
        if host_indices.numel() != pages * self.page_size:
            raise ValueError(
                f"{pages} pages of {self.page_size} tokens need {pages * self.page_size} host "
                f"indices, got {host_indices.numel()}"
            )
        if host_indices.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"host indices must be int64, got {host_indices.dtype}")
        first = host_indices.numpy()[:: self.page_size].astype(np.int64)
        if pages and (
            (first % self.page_size).any()
            or first.min() < 0
            or first.max() >= self.page_count * self.page_size
        ):
            raise ValueError(
                f"host indices {first.tolist()[:8]}... don't all start one of the pool's "
                f"{self.page_count} pages of {self.page_size} tokens"
            )
        return first

    def addresses(self, host_indices: torch.Tensor, pages: int) -> np.ndarray:
        """Addresses of ``pages`` pages' tensors: int64, (pages, tensors), page after page.

        ``host_indices``: as in `first_slots`, which raises ValueError for others. So does this
        for a staged layout.
        """
        if self.staged is not None:
            raise ValueError("the pages of this host pool have no addresses: they are staged")
        numbers = self.first_slots(host_indices, pages) // self.page_size
        return self.bases + numbers[:, None] * self.strides

    def flat_addresses(self, address: int) -> list[int]:
        """Addresses of the tensors of a flat page that lies at ``address``, in the pool's order.

        Raises ValueError for a layout that has no flat page.
        """
        if self.flat_order is None:
            raise ValueError(
                "this host pool layout has no flat page: use the calls without copies "
                "(interface_v1: 1 with SGLang's dynamic backend)"
            )
        addresses = [0] * len(self.tensor_sizes)
        for tensor in self.flat_order:
            addresses[tensor] = address
            address += self.tensor_sizes[tensor]
        return addresses


def page_layout(pool: Any, split: int = 1) -> PageLayout:
    """The layout of a host pool (``HostKVCache``), checked against what it says of some pages.

    ``split``: chunks of heads that a ``page_head`` page is cut into (`PageLayout.chunk`). A pool
    without bytes (SGLang's logical anchor) has pages without tensors.
    Raises `LayoutError` for a pool whose pages can't be told or aren't where they should be, and
    for whatever the pool's own methods raise.
    """
    described = tensors_of(pool, split)
    if described is None:
        return _learnt(pool, split)
    tensors = described.tensors
    layout = PageLayout(
        page_size=described.page_size,
        page_count=described.page_count,
        tensor_sizes=tuple(tensor.size for tensor in tensors),
        bases=np.array([tensor.address for tensor in tensors], dtype=np.int64),
        strides=np.array([tensor.stride for tensor in tensors], dtype=np.int64),
        flat_order=described.flat_order,
    )
    with asking(pool):
        if Offers.META in described.offers:
            for number in _some_pages(layout.page_count):
                _check(layout, number, _page_meta(pool, number, split))
        if Offers.FLAT in described.offers:
            _check_flat(pool, layout)
    return layout


def layout_name(pool: Any) -> str:
    """The layout by which pages are told apart: SGLang's name, and what else orders their bytes."""
    groups = getattr(pool, "head_group_num", 1)
    return f"{pool.layout}-{groups}-groups" if groups != 1 else pool.layout


def _learnt(pool: Any, split: int) -> PageLayout:
    """The layout of a pool of an unknown class, by its own word.

    Believed only where the pages lie at equal distances, and are as large as SGLang's flat ones.
    One that doesn't tell addresses is staged, if it has flat pages.
    """
    with asking(pool):
        if split != 1:
            raise LayoutError(f"pages of this class can't be cut into {split} chunks")
        size, count = pool.page_size, page_count(pool)
        try:
            bases, sizes = _page_meta(pool, 0)
        except Exception as error:
            return _staged(pool, size, count, error)
        if not sizes:
            raise LayoutError("it holds no bytes of its own")
        strides = np.zeros_like(bases)
        if count > 1:
            strides = _page_meta(pool, 1)[0] - bases
        layout = PageLayout(size, count, sizes, bases, strides, None)
        for number in _some_pages(count):
            _check(layout, number, _page_meta(pool, number))
        with contextlib.suppress(NotImplementedError):  # it has no flat page
            _check_flat(pool, layout)
    return layout


def _staged(pool: Any, size: int, count: int, no_addresses: Exception) -> PageLayout:
    """The layout of a pool that copies its pages itself; ``no_addresses``: why nothing else can."""
    try:
        flat = [pool.get_data_page(number * size, flat=True) for number in (0, count - 1)]
        usable = callable(pool.set_from_flat_data_page) and len({f.nbytes for f in flat}) == 1
    except Exception as error:
        raise LayoutError(
            f"its pages have neither addresses ({no_addresses}) nor flat copies ({error})"
        ) from error
    if not usable or flat[0].device.type != "cpu" or not flat[0].nbytes:
        raise LayoutError("its flat pages aren't bytes in the host's memory, equally many for each")
    none = np.zeros(1, dtype=np.int64)
    return PageLayout(size, count, (flat[0].nbytes,), none, none, (0,), flat[0].dtype)


def _some_pages(count: int) -> list[int]:
    return sorted({0, min(1, count - 1), count // 2, count - 1})


def _check(layout: PageLayout, number: int, said: tuple[np.ndarray, tuple[int, ...]]) -> None:
    addresses, sizes = said
    if sizes != layout.tensor_sizes or not np.array_equal(
        addresses, layout.bases + number * layout.strides
    ):
        raise LayoutError(f"page {number} doesn't lie where the others say")


def _check_flat(pool: Any, layout: PageLayout) -> None:
    flat = pool.get_data_page((layout.page_count - 1) * layout.page_size, flat=True)
    if flat.nbytes != layout.page_bytes:
        raise LayoutError(
            f"a flat page has {flat.nbytes} bytes, and its tensors {layout.page_bytes}"
        )


def _page_meta(pool: Any, number: int, split: int = 1) -> tuple[np.ndarray, tuple[int, ...]]:
    indices = torch.arange(number * pool.page_size, (number + 1) * pool.page_size)
    if split == 1:
        addresses, sizes = pool.get_page_buffer_meta(indices)
    else:
        addresses, sizes = pool.get_split_heads_page_buffer_meta(indices, split)
    # A tensor can be empty: that of the index in a pipeline stage without index layers.
    held = [(address, int(size)) for address, size in zip(addresses, sizes, strict=True) if size]
    return np.array([address for address, _ in held], dtype=np.int64), tuple(s for _, s in held)
