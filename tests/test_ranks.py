"""Which ranks store what: one of those that hold it, by SGLang's own rules and our hook."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

import host_pools
from backends import storage_config
from cachestore_connector import context_ranks, plugin, ranks
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


def _contexts(monkeypatch, attach, make, *, tp, cp, pp=1, dp_attention=False, **pool):
    """Ranks of an MLA model with CP: (identity, whether it stores the KV) of each."""
    found = []
    size = tp * cp
    for stage, rank in itertools.product(range(pp), range(size)):
        attn_tp_rank, cp_rank = rank % tp, rank // tp
        parallel = SimpleNamespace(attn_tp_rank=attn_tp_rank)
        monkeypatch.setattr(context_ranks, "get_parallel", lambda parallel=parallel: parallel)
        host_pool = make(**pool)
        given = storage_config(
            "unused",
            is_mla=True,
            tp_rank=attn_tp_rank if dp_attention else rank,
            tp_size=tp if dp_attention else size,
            attn_cp_rank=cp_rank,
            attn_cp_size=cp,
            pp_rank=stage,
            pp_size=pp,
        )
        controller = SimpleNamespace(storage_backend_type="cachestore", storage_host_pool=host_pool)
        config = plugin._storage_config(lambda *_, given=given: given, controller)
        backend = attach(host_pool, **{name: getattr(config, name) for name in _RANKS}, is_mla=True)
        found.append((backend.identity.fingerprint, config.is_storage_writer))
    return found


_RANKS = ("tp_rank", "tp_size", "attn_cp_rank", "attn_cp_size", "pp_rank", "pp_size")


@pytest.mark.parametrize("dp_attention", [False, True])
@pytest.mark.parametrize("split", [False, True], ids=["all layers", "layers split"])
@pytest.mark.parametrize(
    ("tp", "cp", "pp"), [(1, 2, 1), (2, 2, 1), (1, 4, 1), (4, 1, 2), (2, 2, 2)]
)
def test_contexts_have_one_writer_for_what_they_hold(
    monkeypatch, attach, tp, cp, pp, split, dp_attention
):
    """Pinned (F25): every distinct shard of MLA KV has one rank that stores it, and no second."""
    found = _contexts(
        monkeypatch, attach, host_pools.mla_pool, tp=tp, cp=cp, pp=pp,
        dp_attention=dp_attention, layer_shard_enabled=split,
    )  # fmt: skip
    stored = [identity for identity, stores in found if stores]
    assert len({identity for identity, _ in found}) == len(stored) == pp * (cp if split else 1)
    assert {identity for identity, _ in found} == set(stored)


def test_contexts_of_what_is_not_known_store_their_own(monkeypatch, attach):
    """Pinned: a pool that may differ between CP ranks is stored by one rank of each."""
    found = _contexts(monkeypatch, attach, host_pools.mha_pool, tp=2, cp=2)
    assert [stores for _, stores in found] == [True, False, True, False]
    assert len({identity for identity, _ in found}) == 2


def test_other_backends_and_models_keep_sglangs_config():
    """Pinned: only ours, with CP, is changed."""
    for name, cp in (("file", 2), ("cachestore", 1)):
        given = storage_config("unused", is_mla=True, attn_cp_size=cp)
        controller = SimpleNamespace(storage_backend_type=name, storage_host_pool=None)
        assert plugin._storage_config(lambda *_, given=given: given, controller) is given


def test_contexts_of_any_other_model_store_their_kv(monkeypatch):
    """Pinned: every rank of an MHA model does; what several hold, one on each CP rank."""
    pool = SimpleNamespace()
    found = []
    for rank in range(4):
        parallel = SimpleNamespace(attn_tp_rank=rank % 2)
        monkeypatch.setattr(context_ranks, "get_parallel", lambda parallel=parallel: parallel)
        given = storage_config(
            "unused", tp_rank=rank, tp_size=4, attn_cp_rank=rank // 2, attn_cp_size=2
        )
        config = context_ranks.with_one_writer(given, pool)
        assert config.is_storage_writer
        found.append(context_ranks.stores_shared(config))
    assert found == [True, False, True, False]
    # Without the hook nobody knows, and each does; without CP rank 0.
    assert context_ranks.stores_shared(given)
    for rank in range(2):
        given = storage_config("unused", tp_rank=rank, tp_size=2)
        assert context_ranks.stores_shared(given) == (rank == 0)


def test_classes_are_those_that_are_described():
    """Pinned: no class is named here that the layouts don't know."""
    assert {*ranks.REPLICATED, *ranks.SPLIT} <= {*DESCRIBED}


def test_the_table_in_the_docs_is_the_code():
    """Pinned: docs/pools.md shows what `ranks.table` says."""
    assert ranks.table() in DOCS.read_text()
