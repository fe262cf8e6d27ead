"""The pools of an open store: what each one is of SGLang's, and how its pages are found.

A model has a KV pool, and may have side pools: what else belongs to a page. Each is a pool of the
one native store, with an identity of its own. The identities have one family, so that all that
belongs to a page has one block id (`identity`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import identity as identities
from . import model_facts, ranks
from .config import Config
from .errors import Code
from .pages import PageLayout, layout_name
from .prefix_hits import ALL_PAGES, TRAILING_PAGES
from .store import Store

KV = ranks.KV

SGLANG_BATCH = 128  # pages of one call at most, but for the hybrid controller's

# Whose pages are stored only where a prefix ended: a window, or a state.
_TRAILING = ("swa", "auxiliary_swa", "draft_swa", "mamba")

# The order of rows that needs no mention: SGLang's KVBufferLayout.NHD.
_USUAL_ROWS = "nhd"

# What says how a host pool reads its bytes, where sizes and types don't.
_FACTS = (
    "layer_num",
    "target_layer_num",
    "num_mamba_layers",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "item_bytes",
    "row_bytes",
    "ring_size",
    "state_page_bytes",
    "temporal_state_shape",
    "conv_state_shapes",
    "temporal_dtype",
    "conv_dtype",
    "indexer_dtype",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Tensors of a host pool's pages that are a pool of the open store. Immutable.

    ``first``: the number of the first of them in the page. ``number``: the native store's.
    """

    first: int
    tensor_sizes: tuple[int, ...]
    identity: identities.Identity
    number: int

    def sizes(self, pages: int) -> np.ndarray:
        """Sizes of the tensors of so many pages at least, page after page."""
        if pages <= SGLANG_BATCH:
            return self._usual_sizes
        return self._sizes(pages)

    @functools.cached_property
    def _usual_sizes(self) -> np.ndarray:
        return self._sizes(SGLANG_BATCH)

    def _sizes(self, pages: int) -> np.ndarray:
        return np.tile(np.array(self.tensor_sizes, dtype=np.int64), pages)

    def addresses(self, addresses: np.ndarray) -> np.ndarray:
        """Those of this part's tensors, out of (pages, all tensors)."""
        count = len(self.tensor_sizes)
        if addresses.shape[1] == count:
            return addresses
        return np.ascontiguousarray(addresses[:, self.first : self.first + count])


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """A host pool that is stored. Immutable.

    ``name``: SGLang's (PoolName). ``host_pool``: SGLang's. ``parts``: one, or one for each chunk of
    heads (`chunks_of`). ``every_rank_stores``: as `ranks.every_rank_stores`. ``writes``: whether
    this rank does, where SGLang asks it to.
    """

    name: str
    host_pool: Any
    layout: PageLayout
    parts: tuple[Part, ...]
    every_rank_stores: bool
    writes: bool

    @property
    def number(self) -> int:
        """The native store's, of the first part."""
        return self.parts[0].number

    @property
    def identity(self) -> identities.Identity:
        """Of the first part: the block ids are those of all."""
        return self.parts[0].identity

    def lookup(self, store: Store, ids: bytes) -> np.ndarray:
        """Whether each page is stored, all parts of it."""
        present = np.ones(len(ids) // identities.BLOCK_ID_BYTES, dtype=bool)
        for part in self.parts:
            present &= np.array(store.lookup(ids, part.number), dtype=bool)
        return present

    def lookup_prefix(self, store: Store, ids: bytes) -> int:
        """How many of the first pages are stored, all parts of them."""
        for part in self.parts:
            ids = ids[: identities.BLOCK_ID_BYTES * store.lookup_prefix(ids, part.number)]
        return len(ids) // identities.BLOCK_ID_BYTES

    def move(
        self,
        move: Callable[..., list[int]],
        store: Store,
        ids: bytes,
        addresses: np.ndarray,
        parent_id: bytes | None,
    ) -> list[int]:
        """`Store.load` or `Store.dump` of pages: one `Code` each, of the first part that failed.

        ``addresses``: of all tensors, one row a page.
        """
        pages, moved = len(ids) // identities.BLOCK_ID_BYTES, []
        for part in self.parts:
            where, sizes = part.addresses(addresses), part.sizes(pages)
            moved.append(move(store, ids, where, sizes, parent_id, part.number))
        if len(moved) == 1:
            return moved[0]
        return [next(filter(None, codes), Code.OK) for codes in zip(*moved, strict=True)]


def chunks_of(host_pool: Any, name: str, given: Any) -> int:
    """Into how many chunks of heads a rank's pages are cut, each stored by itself; 0: not at all.

    As the contract of SGLang's ``tp_lcm_size`` has it: ranks of every tensor-parallel size that
    divides it store the same chunks, so that pages written at one size are read at another.
    ``given``: SGLang's storage config. Source: HiCacheController._generate_storage_config.
    """
    kind, lcm = type(host_pool).__name__, given.tp_lcm_size
    if not lcm or getattr(host_pool, "layout", None) != "page_head":
        return 0
    return 0 if ranks.replicated(name, kind, given.is_mla_model) else lcm // given.tp_size


def is_trailing(name: str) -> bool:
    """Whether a pool's pages are there only where a prefix ended, as far as its name tells."""
    return name in _TRAILING or name.endswith("_state")


def default_policy(name: str) -> str:
    """What SGLang will ask a pool for, before it has."""
    return TRAILING_PAGES if is_trailing(name) else ALL_PAGES


def identity_of(
    host_pool: Any,
    layout: PageLayout,
    given: Any,
    config: Config,
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    name: str = KV,
    family: str = "",
    chunk: int | None = None,
    fp8_kind: str | None,
    weight_version: str | None,
) -> identities.Identity:
    """The identity of a host pool's pages.

    ``given``: SGLang's storage config. ``arguments``: values of `model_facts.ARGUMENTS`.
    ``family``: of the KV pool; empty for the KV pool. ``chunk``: which one of `chunks_of`;
    ``layout`` is then the chunk's. A pool without bytes has a family, and nothing is stored by its
    identity.
    """
    model = arguments.get("model", {})
    dtype = model_facts.kv_dtype(str(host_pool.dtype), model, fp8_kind)
    side = name != KV
    replicated = ranks.replicated(name, type(host_pool).__name__, given.is_mla_model)
    chunks = 0 if chunk is None else chunks_of(host_pool, name, given)
    variant = model_facts.variant(
        arguments,
        weight_version=weight_version,
        weights_named=config.model_identity is not None,
        plain_kv=model_facts.is_plain(dtype),
        draft_layers=has_draft_layers(host_pool, name),
    )
    # Most pools' layers count from the stage's first one, so that two splits of a model can give a
    # stage as many of other layers. Source: sglang.srt.distributed.utils, get_pp_indices.
    split = os.environ.get("SGLANG_PP_LAYER_PARTITION") if given.pp_size > 1 else None
    if split:
        variant["pp_layer_partition"] = split
    return identities.from_parts(
        namespace=config.namespace,
        model_path=model_facts.place(model.get("model_path")),
        revision=model_facts.revision(model),
        served_model_name=given.model_name,
        model_identity=config.model_identity,
        storage_format_tag=getattr(host_pool, "storage_format_tag", None),
        dtype=dtype,
        layout=layout_name(host_pool),
        device_layout=_device_layout(host_pool),
        page_size=layout.page_size,
        tensor_sizes=layout.tensor_sizes or (1,),
        is_mla=given.is_mla_model,
        tp_replicated=replicated,
        # A chunk is what a rank would have at the largest size.
        tp_rank=given.tp_rank if chunk is None else given.tp_rank * chunks + chunk,
        tp_size=given.tp_size if chunk is None else given.tp_lcm_size,
        pp_rank=given.pp_rank,
        pp_size=given.pp_size,
        attn_cp_rank=given.attn_cp_rank,
        attn_cp_size=given.attn_cp_size,
        cp_replicated=replicated and ranks.same_on_contexts(host_pool),
        dcp_rank=given.dcp_rank,
        dcp_size=given.dcp_size,
        should_split_heads=chunk is not None,
        tp_lcm_size=given.tp_lcm_size,
        start_layer=getattr(host_pool, "start_layer", None),
        end_layer=getattr(host_pool, "end_layer", None),
        variant={**variant, **_facts(host_pool, max(1, chunks))} if side else variant,
        pool=name,
        family=family,
    )


def has_draft_layers(host_pool: Any, name: str = KV) -> bool:
    """Whether a pool's pages are a draft model's, or hold layers of one after the target's.

    Where a side pool doesn't say, it is taken for one that does: that costs hits between servers
    with and without a draft model, and nothing else.
    """
    if name.startswith("draft"):
        return True
    if hasattr(host_pool, "mtp_draft_buffer_infos"):
        return bool(host_pool.mtp_draft_buffer_infos)
    layers = getattr(host_pool, "layer_num", 0)
    if hasattr(host_pool, "target_layer_num"):
        return layers > host_pool.target_layer_num
    return name != KV


def _facts(host_pool: Any, chunks: int) -> dict[str, str]:
    found = {"pool.class": type(host_pool).__name__}
    for fact in _FACTS:
        value = getattr(host_pool, fact, None)
        if fact == "head_num" and value is not None:
            value //= chunks
        if value is not None:
            found[f"pool.{fact}"] = str(value)
    states = getattr(host_pool, "slot_state_buffers", None)
    if states:
        found["pool.slot_states"] = ", ".join(f"{s.dtype} {tuple(s.shape[1:])}" for s in states)
    return found


def _device_layout(host_pool: Any) -> str | None:
    """The order of what the device pool calls a row, where it isn't token, head, element.

    An MHA host pool keeps the rows as they are, whatever SGLANG_USE_HND_KVCACHE and
    SGLANG_AITER_KV_CACHE_LAYOUT make of them.
    Source: sglang.srt.mem_cache.device_pool_info, KVBufferLayout.
    """
    infos = getattr(host_pool, "_buffer_infos", None)
    layout = getattr(getattr(infos[0], "buffers", None), "layout", None) if infos else None
    value = None if layout is None else str(layout.value)
    return None if value == _USUAL_ROWS else value
