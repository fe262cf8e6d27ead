"""Page layouts: from SGLang's host indices to the addresses and sizes of a page's tensors.

A host pool tells them itself (``get_page_buffer_meta``), in a Python loop over pages and layers.
Host pools are plain arrays, so the address of a tensor is linear in the page number; `PageLayout`
learns base and stride of each tensor once and computes a batch in one array operation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

# Layouts whose pages are known to be whole, contiguous ranges per tensor.
LAYOUTS = ("page_first", "page_first_direct", "layer_first", "page_first_kv_split")

# Of those, the ones that SGLang itself has no flat page for (``get_data_page`` raises): a page's
# tensors are in several buffers.
_NO_FLAT_PAGE = ("page_first_kv_split",)


class LayoutError(ValueError):
    """The host pool's pages can't be stored. The message says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Where the tensors of a host pool's pages lie. Immutable; safe between threads.

    ``page_size``: tokens. ``page_count``: pages of the pool. ``tensor_sizes``: bytes, in the
    pool's own order. ``bases``, ``strides``: int64, one number per tensor: its address
    in page 0, and from one page to the next. ``flat_order``: the order of the tensors in SGLang's
    flat page (``get_data_page``), a slice of the pool's one buffer: by address. For layer_first
    that is all K layers, then all V layers, while the tensors alternate. None where SGLang has no
    flat page.
    """

    page_size: int
    page_count: int
    tensor_sizes: tuple[int, ...]
    bases: np.ndarray
    strides: np.ndarray
    flat_order: tuple[int, ...] | None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all tensors."""
        return sum(self.tensor_sizes)

    def addresses(self, host_indices: torch.Tensor, pages: int) -> np.ndarray:
        """Addresses of ``pages`` pages' tensors: int64, (pages, tensors), page after page.

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
        numbers = first // self.page_size
        if pages and (
            (first != numbers * self.page_size).any()
            or numbers.min() < 0
            or numbers.max() >= self.page_count
        ):
            raise ValueError(
                f"host indices {first.tolist()[:8]}... don't all start one of the pool's "
                f"{self.page_count} pages of {self.page_size} tokens"
            )
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


def page_layout(pool: Any) -> PageLayout:
    """The layout of a host pool (``HostKVCache``), learnt from some of its pages.

    Raises `LayoutError` for a pool without pages of its own, of a layout not in `LAYOUTS`, or
    whose addresses turn out not to be linear.
    """
    name = type(pool).__name__
    if getattr(pool, "kv_buffer", None) is None:
        raise LayoutError(f"host pool {name} holds no bytes of its own (side pools come later)")
    if pool.layout not in LAYOUTS:
        raise LayoutError(
            f"host pool layout {pool.layout!r} is not supported; use --hicache-mem-layout "
            + " or ".join(LAYOUTS)
        )
    if getattr(pool, "dcp_size", 1) > 1:
        raise LayoutError("decode context parallelism (DCP) is not supported")
    if getattr(pool, "stores_page_envelope", False):
        raise LayoutError("page-envelope host pools are not supported")
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise LayoutError("host pools shared between ranks are not supported")
    size, count = pool.page_size, pool.page_num
    bases, sizes = _page_meta(pool, 0)
    strides = np.zeros_like(bases)
    if count > 1:
        strides = _page_meta(pool, 1)[0] - bases
    for number in {count // 2, count - 1}:
        addresses, same = _page_meta(pool, number)
        if same != sizes or not np.array_equal(addresses, bases + number * strides):
            raise LayoutError(f"host pool {name}: page {number} doesn't lie as page 0 and 1 do")
    flat_order: list[int] | None = None
    if pool.layout not in _NO_FLAT_PAGE:
        flat_order = list(range(len(sizes)))
        if isinstance(pool.kv_buffer, torch.Tensor):
            flat_order.sort(key=lambda tensor: int(bases[tensor]))
    return PageLayout(
        size, count, sizes, bases, strides, None if flat_order is None else tuple(flat_order)
    )


def _page_meta(pool: Any, number: int) -> tuple[np.ndarray, tuple[int, ...]]:
    indices = torch.arange(number * pool.page_size, (number + 1) * pool.page_size)
    addresses, sizes = pool.get_page_buffer_meta(indices)
    # A tensor can be empty: that of the index in a pipeline stage without index layers.
    held = [(address, int(size)) for address, size in zip(addresses, sizes, strict=True) if size]
    return np.array([address for address, _ in held], dtype=np.int64), tuple(s for _, s in held)
