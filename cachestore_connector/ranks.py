"""Which tensor-parallel ranks hold the same bytes of a host pool, and which of them store it.

SGLang goes by the model's KV (``is_mla_model``) and by pools' names; the truth lies in the class of
the host pool. Source: SGLang 0.5.23, the device pool behind each class, and
`HybridCacheController.should_backup`, which decides who stores a side pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KV = "kv"

# Side pools by their host pool's class: why every rank holds the same.
REPLICATED = {
    "MLATokenToKVPoolHost": "latent KV, not split by heads",
    "DSAIndexerPoolHost": "one index key for all heads",
    "DeepSeekV4PagedHostPool": "compressed latent KV",
    "DeepSeekV4StateHostPool": "state of the compressor of latent KV",
    "MHATokenToKOnlyPoolHost": "one head of index keys",
    "MiniMaxM3Nvfp4IndexKPoolHost": "one head of index keys",
    "QSAIndexerPoolHost": "index heads aren't split",
}

# Side pools whose ranks hold other bytes each. A class that isn't known is taken for one of them.
SPLIT = {
    "MHATokenToKVPoolHost": "KV heads are split",
    "AsymmetricMHATokenToKVPoolHost": "KV heads are split",
    "MHATokenToKVPoolMXFP8Host": "KV heads are split",
    "MambaPoolHost": "state heads are split",
}

# Of these every context-parallel rank has all tokens, unless each rank has layers of its own.
# Source: sglang.srt.layers.cp, materialize_full_mla_kv and materialize_full_indexer_k_cache.
_GATHERED = ("MLATokenToKVPoolHost", "DSAIndexerPoolHost")

# What SGLang itself has every rank store, though the KV is rank 0's.
_SGLANG_STORES = ("mamba",)


def replicated(name: str, kind: str, is_mla: bool) -> bool:
    """Whether every TP rank holds the same bytes of a pool, so that no rank is in its identity.

    ``name``: SGLang's (PoolName). ``kind``: the host pool's class. ``is_mla``: SGLang's
    ``is_mla_model``, which is of the KV pool.
    """
    return is_mla if name == KV else kind in REPLICATED


def every_rank_stores(name: str, kind: str, is_mla: bool) -> bool:
    """Whether each TP rank is to store a pool; else rank 0 alone does."""
    return not replicated(name, kind, is_mla)


def needs_hook(name: str, kind: str, is_mla: bool) -> bool:
    """Whether SGLang would leave a pool to rank 0 that each rank has to store."""
    stores = every_rank_stores(name, kind, is_mla)
    return is_mla and stores and name != KV and name not in _SGLANG_STORES


def same_on_contexts(host_pool: Any) -> bool:
    """Whether it is known that every attention context-parallel rank holds the same bytes."""
    device_pool = getattr(host_pool, "device_pool", None)
    split = getattr(host_pool, "_layer_shard_enabled", False) or getattr(
        device_pool, "layer_shard_enabled", False
    )
    return type(host_pool).__name__ in _GATHERED and not split


def table() -> str:
    """All of the above for docs/pools.md, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield (
        "| pool | ranks hold | TP rank in its identity | stored by, if KV is MLA "
        "| stored by, if it isn't |"
    )
    yield "| --- | --- | --- | --- | --- |"
    yield "| KV of an MLA model | the same | no | rank 0 | |"
    yield "| KV of any other | parts | yes | | every rank |"
    for kinds, same in ((REPLICATED, True), (SPLIT, False)):
        for kind, why in kinds.items():
            name = "mamba" if kind == "MambaPoolHost" else "draft"
            held = "the same" if same else "parts"
            rank = "no" if replicated(name, kind, True) else "yes"
            by = [
                "every rank" if every_rank_stores(name, kind, is_mla) else "rank 0"
                for is_mla in (True, False)
            ]
            if needs_hook(name, kind, True):
                by[0] += " (by the plugin's hook)"
            yield f"| side pool `{kind}` | {held}: {why} | {rank} | {by[0]} | {by[1]} |"
    yield (
        "| side pool of any other class | parts, it is assumed | yes | every rank "
        "(by the plugin's hook) | every rank |"
    )
