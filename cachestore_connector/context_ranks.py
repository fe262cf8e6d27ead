"""Who stores what several ranks hold, under attention context parallelism (CP) too.

Of an MLA model SGLang has one rank store what all tensor-parallel ranks hold. With CP that is one
of the ranks that hold the first part only, where each has layers of its own; or, with data-parallel
attention, one on each CP rank, also where all hold the same. Of any other model it has every rank
store everything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_parallel

from . import ranks


@dataclasses.dataclass
class ContextRankConfig(HiCacheStorageConfig):
    """SGLang's storage config of one rank. ``stores_shared``: it stores what others hold too."""

    stores_shared: bool = False

    @property
    def is_storage_writer(self) -> bool:
        """Whether this rank stores the KV."""
        return not self.is_mla_model or self.stores_shared


def with_one_writer(config: HiCacheStorageConfig, host_pool: Any) -> HiCacheStorageConfig:
    """SGLang's ``config``, or where there are CP ranks, one that says which of them stores.

    ``host_pool``: the anchor. To be called where SGLang's parallel state is known.
    """
    if config.attn_cp_size == 1:
        return config
    holds_others = config.attn_cp_rank == 0 or not ranks.same_on_contexts(host_pool)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return ContextRankConfig(
        **fields, stores_shared=get_parallel().attn_tp_rank == 0 and holds_others
    )


def stores_shared(config: HiCacheStorageConfig) -> bool:
    """Whether this rank stores what others hold too. With CP and no plugin, each one does."""
    default = config.tp_rank == 0 or config.attn_cp_size > 1
    return getattr(config, "stores_shared", default)
