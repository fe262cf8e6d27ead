"""Who stores an MLA model's pages under attention context parallelism (CP).

SGLang has one rank store what all tensor-parallel ranks hold. With CP that is one of the ranks that
hold the first part only, where each has layers of its own, or, with data-parallel attention, one on
each CP rank, also where all hold the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_parallel

from . import ranks


@dataclasses.dataclass
class ContextRankConfig(HiCacheStorageConfig):
    """SGLang's storage config of one rank, which is told whether it stores the KV."""

    stores: bool = False

    @property
    def is_storage_writer(self) -> bool:
        """Whether this rank stores what is the same on several."""
        return self.stores


def with_one_writer(config: HiCacheStorageConfig, host_pool: Any) -> HiCacheStorageConfig:
    """SGLang's ``config``, or where CP changes who is to store the KV, one that says so.

    ``host_pool``: the anchor. To be called where SGLang's parallel state is known.
    """
    if not config.is_mla_model or config.attn_cp_size == 1:
        return config
    holds_others = config.attn_cp_rank == 0 or not ranks.same_on_contexts(host_pool)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    stores = get_parallel().attn_tp_rank == 0 and holds_others
    return ContextRankConfig(**fields, stores=stores)
