"""Which bytes of a host pool's buffers make a page: for every host pool class of SGLang 0.5.23.

Every class keeps a page as whole, contiguous ranges of buffers of its own, at a fixed distance from
one page to the next, also those whose `get_page_buffer_meta` says that it can't tell them. Here is
said which: by class and layout, from the buffers' own shapes and strides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

# Every layout that SGLang has a name for.
LAYOUTS = (
    "page_first",
    "page_first_direct",
    "layer_first",
    "page_first_kv_split",
    "page_head",
    "page_unified",
)


class LayoutError(ValueError):
    """The host pool's pages can't be stored. The message says what is wrong with it."""


class Offers(enum.Flag):
    """What SGLang's own code says of a page, and so what ours can be checked against."""

    NOTHING = 0
    META = enum.auto()  # `get_page_buffer_meta`: addresses and sizes
    FLAT = enum.auto()  # `get_data_page`: the bytes, one after another


@dataclasses.dataclass(frozen=True)
class PageTensor:
    """A tensor of a pool's pages: its address in page 0, the bytes to the next page, its size."""

    address: int
    stride: int
    size: int


@dataclasses.dataclass(frozen=True)
class Region:
    """A buffer, or a view of one: the first axes tell tensors apart, the next pages.

    ``view``: axes (tensors..., rows, what a row holds...). ``leading``: how many axes tell tensors
    apart, in the pool's own order. ``rows``: how many rows are a page's.
    """

    view: torch.Tensor
    leading: int
    rows: int

    def tensors(self, page_count: int) -> list[PageTensor]:
        """The tensors of a page. Raises `LayoutError` where pages aren't whole ranges inside."""
        view, axis = self.view, self.leading
        if view.device.type != "cpu":
            raise LayoutError(f"a buffer lies on {view.device}, not in the host's memory")
        if view.shape[axis] < page_count * self.rows:
            raise LayoutError(
                f"a buffer of {view.shape[axis]} rows can't hold {page_count} pages of {self.rows}"
            )
        if view.numel() == 0:
            return []
        if not view[(0,) * axis][: self.rows].is_contiguous():
            raise LayoutError(f"a page of a buffer with strides {view.stride()} lies in pieces")
        size = self.rows * view[(0,) * (axis + 1)].nbytes
        stride = self.rows * view.stride(axis) * view.itemsize
        return [
            PageTensor(view[index].data_ptr(), stride, size)
            for index in itertools.product(*map(range, view.shape[:axis]))
        ]


@dataclasses.dataclass(frozen=True)
class PoolTensors:
    """A pool's pages: ``tensors`` in the pool's own order, those without bytes left out.

    ``page_size``: slots of a page's indices. ``flat_order``: the tensors in the order of
    SGLang's flat page; None where it has none.
    """

    page_size: int
    page_count: int
    tensors: tuple[PageTensor, ...]
    flat_order: tuple[int, ...] | None
    offers: Offers


def tensors_of(pool: Any, split: int = 1) -> PoolTensors | None:
    """Where the tensors of a host pool's pages lie; None for a class that isn't known here.

    ``split``: into how many chunks the heads of a ``page_head`` page are cut. A page's tensors are
    then K and V of the first chunk, K and V of the next, and so on.
    Raises `LayoutError` for a pool whose pages aren't its own, or can't be cut so.
    """
    refuse_foreign(pool)
    known = _KNOWN.get(type(pool).__name__)
    if known is None:
        return None
    with asking(pool):
        layout, size = pool.layout, pool.page_size
        if layout not in known.layouts:
            raise LayoutError(
                "this layout is not supported; use --hicache-mem-layout "
                + " or ".join(known.layouts)
            )
        if split != 1:
            _refuse_split(pool, split)
        regions = known.regions(pool, split)
        count = page_count(pool)
        found = [
            (number, tensor)
            for number, region in enumerate(regions)
            for tensor in region.tensors(count)
        ]
        if not found and type(pool).__name__ != LOGICAL:
            raise LayoutError("it holds no bytes of its own")
        offers = known.layouts[layout]
        if known.meta_raises(pool):
            offers &= ~Offers.META
    order = sorted(range(len(found)), key=lambda i: (found[i][0], found[i][1].address))
    return PoolTensors(
        page_size=size,
        page_count=count,
        tensors=tuple(tensor for _, tensor in found),
        flat_order=tuple(order) if Offers.FLAT in offers else None,
        offers=offers,
    )


def refuse_foreign(pool: Any) -> None:
    """Raise `LayoutError` for a pool whose pages aren't a rank's own, or don't stay where they are.

    By class, or by what every host pool says of itself.
    """
    with asking(pool):
        # It forwards everything but its slots to the pool inside, so nothing else tells it.
        if type(pool).__name__ == "PageInterleaveHostPool":
            raise LayoutError(
                f"shard_size is {pool.shard_size}: KV sharding is not supported, as a rank holds "
                "only some of the pages; only 1 is"
            )
        if getattr(pool, "dcp_size", 1) > 1:
            raise LayoutError(
                f"dcp_size is {pool.dcp_size}: decode context parallelism (DCP) is not supported; "
                "only 1 is"
            )
        if getattr(pool, "stores_page_envelope", False):
            raise LayoutError(
                "stores_page_envelope is True: page-envelope host pools are not supported, as "
                "their pages move; only False is"
            )
        domain = getattr(pool, "shared_allocation_domain", None)
        if domain is not None:
            raise LayoutError(
                f"shared_allocation_domain is of type {type(domain).__name__}: host pools shared "
                "between ranks are not supported; only None is"
            )
        if getattr(pool, "_is_dummy", False):
            raise LayoutError(
                "_is_dummy is True: this rank holds no bytes, as MLA pages are kept once a host; "
                "only False is supported"
            )


def page_count(pool: Any) -> int:
    """How many pages a pool has. The classes say so by different names."""
    for name in ("page_num", "num_host_pages"):
        if hasattr(pool, name):
            return getattr(pool, name)
    return pool.size // pool.page_size


@contextlib.contextmanager
def asking(pool: Any) -> Iterator[None]:
    """Turn whatever is raised inside into a `LayoutError` that names the pool."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, LayoutError) else f"{type(error).__name__}: "
        layout = getattr(pool, "layout", None)
        raise LayoutError(
            f"host pool {type(pool).__name__} with layout {layout!r}: {kind}{error}"
        ) from error


def _refuse_split(pool: Any, split: int) -> None:
    if pool.layout != "page_head":
        raise LayoutError(f"only page_head can be split by heads, asked for {split} chunks")
    if split < 1 or pool.head_num % split:
        raise LayoutError(f"{pool.head_num} heads can't be cut into {split} equal chunks")


# The buffers of each class. A region's order of tensors is that of `get_page_buffer_meta`.


def _held(pool: Any, name: str) -> Any:
    buffer = getattr(pool, name)
    if buffer is None:  # the pool was destroyed, or never had one
        raise LayoutError(f"it holds no bytes of its own: {name} is None")
    return buffer


def _rows(pool: Any) -> int:
    """Rows of a page in a buffer with pages first: its tokens, or the page is one row."""
    return pool.page_size if pool.layout == "page_first" else 1


def _mha(pool: Any, split: int) -> list[Region]:
    kv = _held(pool, "kv_buffer")
    if pool.layout == "layer_first":  # K and V of a layer, then the next layer's
        return [Region(kv.transpose(0, 1), 2, pool.page_size)]
    if pool.layout == "page_head":
        return [Region(kv.unflatten(2, (split, -1)).movedim(2, 0), 2, 1)]
    if pool.layout == "page_unified":
        return [Region(kv, 0, 1)]
    return [Region(kv, 1, _rows(pool))]


def _asymmetric_mha(pool: Any, _: int) -> list[Region]:
    return [Region(buffer, 0, _rows(pool)) for buffer in _held(pool, "kv_buffer")]


def _mxfp8(pool: Any, _: int) -> list[Region]:
    scales = [_held(pool, name) for name in ("k_scale_host", "v_scale_host")]
    return [*_mha(pool, 1), *(Region(scale, 0, 1) for scale in scales)]


def _one_buffer(pool: Any, name: str) -> list[Region]:
    """Tokens' rows of all layers: in pages or in layers."""
    buffer = _held(pool, name)
    if pool.layout == "layer_first":
        return [Region(buffer, 1, pool.page_size)]
    return [Region(buffer, 0, _rows(pool))]


def _mla(pool: Any, _: int) -> list[Region]:
    if pool.layout != "page_first_kv_split":
        return _one_buffer(pool, "kv_buffer")
    # Packed FP8 has K and V in K's rows; V's buffer is there, and never written.
    v = None if pool.dsa_kv_cache_store_fp8 else pool.v_buffer
    buffers = (pool.k_buffer, v, pool.index_k_buffer, pool.index_k_scale_buffer)
    return [Region(buffer, 0, 1) for buffer in buffers if buffer is not None]


def _k_only(pool: Any, _: int) -> list[Region]:
    return _one_buffer(pool, "k_buffer")


def _dsa(pool: Any, _: int) -> list[Region]:
    # One page more than the pool has, which no index leads to.
    buffer = _held(pool, "index_k_with_scale_buffer")
    return [Region(buffer, int(pool.layout == "layer_first"), 1)]


def _mamba(pool: Any, _: int) -> list[Region]:
    buffers = (pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers)
    return [Region(buffer, 0, 1) for buffer in buffers]


def _page_rows(pool: Any, _: int) -> list[Region]:
    held = _held(pool, "kv_buffer")
    buffers = held if pool.layout == "layer_first" else [held]
    return [Region(buffer, 0, 1) for buffer in buffers]


def _nvfp4(pool: Any, _: int) -> list[Region]:
    kv = _held(pool, "kv_buffer")
    if pool.layout == "layer_first":
        return [Region(kv, 1, 1)]
    # SGLang has the layers of a page in so many objects; the first ones have a layer more.
    return [Region(part, 0, 1) for part in kv.tensor_split(pool.storage_objects_per_page, dim=1)]


def _nothing(pool: Any, _: int) -> list[Region]:
    return []


@dataclasses.dataclass(frozen=True)
class _Known:
    regions: Callable[[Any, int], list[Region]]
    layouts: Mapping[str, Offers]
    # Of which pools SGLang can't tell the addresses, though of others of the class and layout.
    meta_raises: Callable[[Any], bool] = lambda _: False


_BOTH = Offers.META | Offers.FLAT
_PAGES_FIRST = dict.fromkeys(("page_first", "page_first_direct"), _BOTH)
_FLAT_LAYERS = _PAGES_FIRST | {"layer_first": Offers.FLAT}
_ALL_THREE = _PAGES_FIRST | {"layer_first": _BOTH}

# SGLang's anchor of models whose KV is all in side pools: slots without bytes.
LOGICAL = "LogicalHostPool"

_KNOWN: Mapping[str, _Known] = {
    "MHATokenToKVPoolHost": _Known(
        _mha, _ALL_THREE | {"page_head": _BOTH, "page_unified": Offers.NOTHING}
    ),
    "HiSparseMHATokenToKVPoolHost": _Known(_mha, {"layer_first": _BOTH}),
    "AsymmetricMHATokenToKVPoolHost": _Known(
        _asymmetric_mha, dict.fromkeys(_PAGES_FIRST, Offers.META)
    ),
    "MHATokenToKVPoolMXFP8Host": _Known(_mxfp8, {"page_first": Offers.NOTHING}),
    "MLATokenToKVPoolHost": _Known(
        _mla,
        _ALL_THREE | {"page_first_kv_split": Offers.META, "page_unified": Offers.NOTHING},
    ),
    "MHATokenToKOnlyPoolHost": _Known(_k_only, _FLAT_LAYERS),
    "DSAIndexerPoolHost": _Known(_dsa, _FLAT_LAYERS),
    "MambaPoolHost": _Known(_mamba, _PAGES_FIRST, lambda pool: bool(pool.slot_state_buffers)),
    "DeepSeekV4PagedHostPool": _Known(_page_rows, _ALL_THREE),
    "QSAIndexerPoolHost": _Known(_page_rows, _ALL_THREE),
    "DeepSeekV4StateHostPool": _Known(_page_rows, _ALL_THREE),
    "MiniMaxM3Nvfp4MainKVPoolHost": _Known(
        _nvfp4, _FLAT_LAYERS, lambda pool: pool.layer_num < pool.storage_objects_per_page
    ),
    "MiniMaxM3Nvfp4IndexKPoolHost": _Known(_nvfp4, _FLAT_LAYERS),
    LOGICAL: _Known(_nothing, dict.fromkeys(LAYOUTS, Offers.FLAT)),
}

# What is described, as the tests read it: every layout of every class.
DESCRIBED: Mapping[str, Mapping[str, Offers]] = {
    name: known.layouts for name, known in _KNOWN.items()
}
