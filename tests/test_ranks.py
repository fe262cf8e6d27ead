"""Which ranks store what: one of those that hold it, by SGLang's own rules and our hook."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from cachestore_connector import ranks
from cachestore_connector.pool_tensors import DESCRIBED

DOCS = Path(__file__).parents[1] / "docs" / "pools.md"
KINDS = [*ranks.REPLICATED, *ranks.SPLIT, "SomethingNew"]
GRID = [(name.value, kind) for name in PoolName for kind in KINDS if name != PoolName.KV]


def _sglang_stores(name, rank, is_mla):
    """What SGLang's controller does for our backend on a rank, without our hook."""
    controller = SimpleNamespace(
        backup_skip=is_mla and rank != 0,
        storage_backend_type="cachestore",
        mem_pool_host=SimpleNamespace(entry_map={}),
    )
    return HybridCacheController.should_backup(controller, PoolTransfer(name=PoolName(name)))


@pytest.mark.parametrize("is_mla", [True, False], ids=["MLA", "MHA"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_that_is_held_is_stored(size, is_mla):
    """Pinned (F25): of every pool and class, each identity has a rank that stores it."""
    for name, kind in GRID:
        same = ranks.replicated(name, kind, is_mla)
        hooked = ranks.every_rank_stores(name, kind, is_mla)
        stored = {
            None if same else rank
            for rank in range(size)
            if _sglang_stores(name, rank, is_mla) or hooked
        }
        assert stored == ({None} if same else set(range(size))), (name, kind)


def test_the_hook_is_where_sglang_says_no():
    """Pinned: SGLang's answer and ours differ exactly where the hook is said to be needed."""
    for name, kind in GRID:
        theirs = _sglang_stores(name, 1, True)
        ours = ranks.every_rank_stores(name, kind, True)
        assert ranks.needs_hook(name, kind, True) == (ours and not theirs)
        assert not ranks.needs_hook(name, kind, False)
    # What SGLang has every rank store, it does with a rank in the key; so do we.
    assert not ranks.replicated("mamba", "MambaPoolHost", True)


def test_kv_is_as_sglang_says():
    """Pinned: for the KV pool SGLang's own word counts, whatever the class."""
    assert ranks.replicated("kv", "MHATokenToKVPoolHost", True)
    assert not ranks.replicated("kv", "MLATokenToKVPoolHost", False)
    assert not ranks.needs_hook("kv", "MHATokenToKVPoolHost", True)


def test_classes_are_those_that_are_described():
    """Pinned: no class is named here that the layouts don't know."""
    assert {*ranks.REPLICATED, *ranks.SPLIT} <= {*DESCRIBED}


def test_the_table_in_the_docs_is_the_code():
    """Pinned: docs/pools.md shows what `ranks.table` says."""
    assert ranks.table() in DOCS.read_text()
