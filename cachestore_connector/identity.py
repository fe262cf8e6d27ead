"""Identity: everything that makes the bytes of a page differ for the same tokens.

SGLang's page key says which tokens a page is for. Model, data type, layout, sharding and the rest
are said by the `Identity`. Two caches with different identities never share a block; two processes
with the same identity share all of them.

What SGLang keeps for one page lies in several places: each rank that holds other bytes has a part
of it, and so has each host pool. Parts have identities of their own and one *family*: the fields
that are the same for all of them. Page key and family together make the block id, so that the
parts of a page have the same id, each in the directory of its identity.

`Identity.block_ids` is the only way from a page key to a block id: lookups, loads and dumps all use
it. `block_id` is the same, for who knows no more of an identity than its family.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import ConfigError

# Of what the fingerprint covers and of how block ids are derived. Raise it to leave every block
# stored so far behind.
FORMAT_VERSION = 3

FINGERPRINT_BYTES = 32
BLOCK_ID_BYTES = 16

# What the parts of one page differ in.
_OF_A_PART = (
    "family",
    "pool",
    "tensor_sizes",
    "tp_rank",
    "pp_rank",
    "attn_cp_rank",
    "dcp_rank",
    "start_layer",
    "end_layer",
)

# Separates these hashes from every other use of BLAKE2b; exactly its 16 bytes.
_PERSON = b"cachestore-block"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a cache of pages is for. Made by `from_parts`; immutable, safe between threads.

    Fields that don't apply are None, and equal identities have equal fingerprints. What ranks
    say, by what SGLang 0.5.23 holds where:

    - Tensor parallel. MHA splits the KV heads, so rank and size are in. MLA replicates the KV
      over the ranks, so the rank is not in; the size is, as the contract asks. With attention
      data parallelism the rank and size SGLang gives are those inside the attention group, and
      the data-parallel rank is never in: every replica computes the same KV.
      (managers/cache_controller.py, _generate_storage_config; mem_cache/hicache_storage.py,
      HiCacheFile.__init__)
    - Pipeline parallel. A stage holds its layers only: rank and size are in, MLA or not.
    - Attention context parallel. SGLang's file backend keys by it for every model
      (HiCacheFile.__init__). What a rank holds depends on the feature: under DSA cache layer
      split each holds other layers (mem_cache/dsa_cache_layer_split.py); otherwise prefill CP
      gathers the KV, and each holds all of it (layers/cp/zigzag.py, layers/cp/interleave.py,
      materialize_full_mla_kv). So rank and size are in, unless ``cp_replicated`` says that the
      KV is known to be whole on every rank; then the size alone is.
    - Decode context parallel. Each rank holds a part of every page, also of an MLA page; several
      groups inside TP hold equal parts (HiCacheStorageConfig.is_storage_writer). Rank and size
      are in.

    ``namespace`` is the user's own: tenants and experiments that are to share nothing.

    ``family``: 64 hex digits, the SHA-256 of the fields that all parts of a page share, those of
    its KV pool.
    """

    namespace: str | None
    model_path: str | None
    revision: str | None
    served_model_name: str | None
    model_identity: str | None
    storage_format_tag: str | None
    dtype: str
    layout: str
    device_layout: str | None
    page_size: int
    tensor_sizes: tuple[int, ...]
    is_mla: bool
    tp_rank: int | None
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int | None
    attn_cp_size: int
    dcp_rank: int
    dcp_size: int
    should_split_heads: bool
    tp_lcm_size: int | None
    start_layer: int | None
    end_layer: int | None
    variant: tuple[tuple[str, str], ...]
    pool: str
    family: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not self.family:
            shared = {name: v for name, v in self.parts().items() if name not in _OF_A_PART}
            object.__setattr__(self, "family", hashlib.sha256(canonical_json(shared)).hexdigest())

    def parts(self) -> dict[str, Any]:
        """Every field that says something, by name: JSON types only.

        A field that is None, or has nothing in it, is left out, so that a field added later
        leaves the fingerprints of caches that don't use it as they were.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["tensor_sizes"] = list(self.tensor_sizes)
        fields["variant"] = dict(self.variant) or None
        return {name: value for name, value in fields.items() if value is not None}

    def canonical(self) -> bytes:
        """The `parts`, as `canonical_json` writes them."""
        return canonical_json(self.parts())

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 of `canonical`: 32 bytes."""
        return hashlib.sha256(self.canonical()).digest()

    @functools.cached_property
    def directory_name(self) -> str:
        """A name for people to recognise, with hex digits to tell apart.

        Of the model and the namespace, if there is one, and 16 digits of the family; then, after
        the last dot, of the pool and 16 of the fingerprint. At most 136 characters of
        ``[A-Za-z0-9._-]``, and no leading dot.
        """
        name = self.model_identity or self.model_path or ""
        words = [_slug(name.rstrip("/").rpartition("/")[2], 40) or "model"]
        if self.namespace is not None:
            words.append(_slug(self.namespace, 20) or "namespace")
        pool = re.sub(r"[^A-Za-z0-9_-]", "_", self.pool)[:40]
        return f"{'-'.join([*words, self.family[:16]])}.{pool}-{self.fingerprint[:8].hex()}"

    @functools.cached_property
    def _keyed_hash(self) -> Any:
        return _keyed_hash(self.family)

    def block_id(self, key: str) -> bytes:
        """The 16-byte id of the block for page ``key``: any string, as `block_ids` does it."""
        return self.block_ids((key,))

    def block_ids(self, keys: Iterable[str]) -> bytes:
        """The ids of the blocks for page ``keys``, 16 bytes each, one after another.

        An id is BLAKE2b-128 of the key's UTF-8, keyed with the family. The state after the family
        is copied for every key, which takes a third less time than starting anew.
        """
        keyed = self._keyed_hash.copy
        ids = []
        for key in keys:
            hashed = keyed()
            hashed.update(key.encode("utf-8", "surrogatepass"))
            ids.append(hashed.digest())
        return b"".join(ids)

    def __getstate__(self) -> dict[str, Any]:
        # Without what is cached: a hash object can't be pickled.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def block_id(family: str, key: str) -> bytes:
    """The id of the block for page ``key`` in every identity of a family (64 hex digits)."""
    hashed = _keyed_hash(family)
    hashed.update(key.encode("utf-8", "surrogatepass"))
    return hashed.digest()


def _keyed_hash(family: str) -> Any:
    key = bytes.fromhex(family)
    return hashlib.blake2b(digest_size=BLOCK_ID_BYTES, key=key, person=_PERSON)


def canonical_json(parts: Mapping[str, Any]) -> bytes:
    """What a fingerprint is taken of: sorted keys, no blanks, UTF-8, surrogates as they are."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _slug(name: str, length: int) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:length]


def from_parts(
    *,
    namespace: str | None = None,
    model_path: str | None = None,
    revision: str | None = None,
    served_model_name: str | None = None,
    model_identity: str | None = None,
    storage_format_tag: str | None = None,
    dtype: str,
    layout: str,
    device_layout: str | None = None,
    page_size: int,
    tensor_sizes: Sequence[int],
    is_mla: bool,
    tp_replicated: bool | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    attn_cp_rank: int = 0,
    attn_cp_size: int = 1,
    cp_replicated: bool = False,
    dcp_rank: int = 0,
    dcp_size: int = 1,
    should_split_heads: bool = False,
    tp_lcm_size: int | None = None,
    start_layer: int | None = None,
    end_layer: int | None = None,
    variant: Mapping[str, str] | None = None,
    pool: str = "kv",
    family: str = "",
) -> Identity:
    """The identity of one cache, with what doesn't apply left out (see `Identity`).

    ``namespace``: the user's, if any. ``model_path``, ``revision``, ``served_model_name``: as
    SGLang knows them; all three are replaced by ``model_identity`` where that is given.
    ``storage_format_tag``: the host pool's own, if any; it is kept in either case. ``dtype``: the
    KV's own type, as in ``bfloat16``: not the type it is stored as, since every FP8 kind is stored
    as ``uint8``. ``layout``: the host pool's; ``device_layout``: the device pool's, if the rows
    that it has are in an order of their own, which the host pool keeps. ``page_size``: tokens.
    ``tensor_sizes``: bytes of each tensor of a page, in the order in which they are stored.
    ``tp_replicated``: whether all tensor-parallel ranks hold the same bytes; left out, those of an
    MLA model do. ``tp_lcm_size`` counts only with ``should_split_heads``. ``start_layer``,
    ``end_layer``: the pool's, if known. ``variant``: whatever else changes the bytes (quantization,
    model overrides), as name -> value. ``pool``: which of a model's host pools this is. ``family``:
    of the model's KV pool, if this isn't it.

    Raises `ConfigError` if nothing but the served name says which weights these are: two models
    can be served under one name, and their pages would be taken for each other's. Raises
    ValueError or TypeError for parts that can't be true.
    """
    if model_identity is not None:
        model_path = revision = served_model_name = None
    elif not model_path:
        raise ConfigError(
            "model_identity",
            None,
            "a non-empty string",
            hint="SGLang gave no model path, and a served model name "
            f"({served_model_name!r}) can belong to several models",
        )
    tensor_sizes = tuple(tensor_sizes)
    for name, text in (("dtype", dtype), ("layout", layout), ("pool", pool)):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be a non-empty string, got {text!r}")
    for name, size in (("page_size", page_size), *(("tensor_sizes", n) for n in tensor_sizes)):
        _require_int(name, size, 1)
    if not tensor_sizes:
        raise ValueError("tensor_sizes must not be empty")
    for name, rank, size in (
        ("tp", tp_rank, tp_size),
        ("pp", pp_rank, pp_size),
        ("attn_cp", attn_cp_rank, attn_cp_size),
        ("dcp", dcp_rank, dcp_size),
    ):
        _require_int(f"{name}_size", size, 1)
        _require_int(f"{name}_rank", rank, 0)
        if rank >= size:
            raise ValueError(f"{name}_rank {rank} is not a rank of {name}_size {size}")
    if should_split_heads:
        _require_int("tp_lcm_size", tp_lcm_size, 1)
    for name, layer in (("start_layer", start_layer), ("end_layer", end_layer)):
        if layer is not None:
            _require_int(name, layer, 0)
    if family and not re.fullmatch(f"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}", family):
        raise ValueError(f"family must be {2 * FINGERPRINT_BYTES} hex digits, got {family!r}")
    replicated = is_mla if tp_replicated is None else tp_replicated
    pairs = tuple(sorted((variant or {}).items()))
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise TypeError(f"variant must hold strings only, got {variant!r}")
    return Identity(
        namespace=namespace or None,
        model_path=model_path,
        revision=revision or None,
        served_model_name=served_model_name or None,
        model_identity=model_identity,
        storage_format_tag=storage_format_tag or None,
        dtype=dtype,
        layout=layout,
        device_layout=device_layout or None,
        page_size=page_size,
        tensor_sizes=tensor_sizes,
        is_mla=bool(is_mla),
        tp_rank=None if replicated else tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        attn_cp_rank=None if cp_replicated else attn_cp_rank,
        attn_cp_size=attn_cp_size,
        dcp_rank=dcp_rank,
        dcp_size=dcp_size,
        should_split_heads=bool(should_split_heads),
        tp_lcm_size=tp_lcm_size if should_split_heads else None,
        start_layer=start_layer,
        end_layer=end_layer,
        variant=pairs,
        pool=pool,
        family=family,
    )


def _require_int(name: str, value: Any, low: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
