"""Side pools are attached, told apart, refused, and end with the store."""

import logging

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

import host_pools
import side_pools
from backends import blocks, counters_become, keys
from cachestore_connector.errors import ConfigError
from pool_stacks import OTHERS, SIX, STACKS, Rank, at_once, stored


def test_windows_alone_are_stored_too(attach):
    """Pinned: a logical anchor with nothing but windows is served once all are registered."""
    anchor = side_pools.logical_pool(layout="page_first")
    window = side_pools.paged_pool(layout="page_first", fill=46)
    backend = attach(anchor, is_mla=True)
    backend.register_mem_host_pool_v2(window, PoolName.SWA)
    assert backend.counters() == {}
    backend.on_host_pools_registered()
    side = PoolTransfer(
        name=PoolName.SWA, keys=keys(2), host_indices=host_pools.indices(window, [4, 2]),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )  # fmt: skip
    assert backend.batch_set_v2([side]) == {"swa": [True, True]}
    assert backend.batch_exists_v2(keys(3), [side]).restorable_prefix_pages == [1, 2]


def test_a_pool_that_comes_late(attach):
    """Pinned: a draft model's pool is registered while the store is in use, and served from then.

    Before, nothing is promised for it; stored pages of the others stay.
    """
    rank = Rank(attach, "dsa", fill=47, late=("indexer",))
    names = keys(6)
    (side,) = rank.sides
    assert rank.backend.batch_set_v1(names, rank.indices("kv", SIX)) == [True] * 6
    assert rank.backend.batch_set_v2([rank.transfer(side, names, SIX)]) == {"indexer": [False] * 6}
    assert rank.exists(names).kv_hit_pages == 0
    failures = at_once(
        lambda: rank.backend.batch_exists(names),
        lambda: rank.load(names, OTHERS),
        lambda: rank.register("indexer"),
        times=10,
    )
    assert failures == []
    assert rank.backend.batch_set_v2([rank.transfer(side, names, SIX)]) == {"indexer": [True] * 6}
    assert rank.exists(names).kv_hit_pages == 6


def test_two_ranks_of_a_hybrid_model(attach):
    """Pinned (F23, F25): MLA's KV is shared, recurrent states under it are each rank's own."""
    given = {"is_mla": True, "tp_size": 2}
    numbers = [0, 1]
    side = dict(layout="page_first")

    def rank(number, fill):
        kv = host_pools.mla_pool(fill=fill, **side)
        states = side_pools.mamba_pool(fill=None if fill is None else fill + number, **side)
        backend = attach(kv, tp_rank=number, known=[("kv", kv), ("mamba", states)], **given)
        transfer = PoolTransfer(
            name=PoolName.MAMBA, keys=keys(2), host_indices=host_pools.indices(states, numbers),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )  # fmt: skip
        return kv, states, backend, transfer

    kv, states, first, transfer = rank(0, 52)
    _, more, second, its = rank(1, 52)
    first.batch_set_v1(keys(2), host_pools.indices(kv, numbers))
    first.batch_set_v2([transfer])
    counters_become([first], cache_stored=2)
    asked = PoolTransfer(name=PoolName.MAMBA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert first.batch_exists_v2(keys(2), [asked]).kv_hit_pages == 2
    assert second.batch_exists_v2(keys(2), [asked]).extra_pool_hit_pages == {"kv": 2}
    assert second.every_rank_stores("mamba") and not second.every_rank_stores("kv")
    assert second.batch_set_v2([its]) == {"mamba": [True, True]}
    assert second.batch_exists_v2(keys(2), [asked]).kv_hit_pages == 2
    for number, theirs in ((0, states), (1, more)):
        _, empty, reader, into = rank(number, None)
        assert reader.batch_get_v2([into]) == {"mamba": [True, True]}
        for page in numbers:
            assert torch.equal(
                host_pools.page_bytes(empty, page), host_pools.page_bytes(theirs, page)
            )
    assert not torch.equal(host_pools.page_bytes(states, 0), host_pools.page_bytes(more, 0))


def test_what_all_ranks_of_an_mha_model_hold_is_stored_once(attach, tmp_path):
    """Pinned: SGLang has each rank store it; rank 0 does, and the others say what is there."""
    names, numbers = keys(3), range(3)

    def rank(number, fill):
        kv = host_pools.mha_pool(fill=fill)
        side = side_pools.key_only_pool(layout="page_first", fill=fill)
        known = [("kv", kv), ("indexer", side)]
        backend = attach(kv, tp_rank=number, tp_size=2, known=known)
        indices = host_pools.indices(side, numbers)
        return backend, side, PoolTransfer(PoolName.INDEXER, keys=names, host_indices=indices)

    (first, source, its), (second, _, others) = rank(0, 54), rank(1, 55)
    assert second.batch_set_v2([others]) == {"indexer": [False] * 3}
    assert blocks(tmp_path) == []
    assert first.batch_set_v2([its]) == {"indexer": [True] * 3}
    assert second.batch_set_v2([others]) == {"indexer": [True] * 3}
    assert second.counters()["dump_ok"] == 0
    reader, target, into = rank(1, None)
    assert reader.batch_get_v2([into]) == {"indexer": [True] * 3}
    assert torch.equal(host_pools.page_bytes(target, 2), host_pools.page_bytes(source, 2))


@pytest.mark.parametrize("name", ["dsa", "deepseek_v4"])
def test_replicated_side_pools_are_shared(attach, name):
    """Pinned (F25): what rank 0 alone stores of replicated pools, every rank restores."""
    writer = stored(Rank(attach, name, fill=53, tp_size=2), keys(6))
    peer = Rank(attach, name, tp_rank=1, tp_size=2)
    assert not any(peer.backend.every_rank_stores(side.name) for side in peer.sides)
    assert peer.exists(keys(6)).kv_hit_pages == 6
    assert all(all(answers) for answers in peer.load(keys(6), OTHERS).values())
    for side in peer.sides:
        assert peer.same_page(side.name, OTHERS[5], writer, SIX[5])


def test_another_stage_or_model_is_a_miss(attach):
    """Pinned (F22): side pools have identities as KV has, and of what they are."""
    one = Rank(attach, "swa", fill=54)
    stored(one, keys(6))
    for other in ({"pp_rank": 1, "pp_size": 2}, {"extra": {"namespace": "tenant"}}):
        rank = Rank(attach, "swa", fill=55, **other)
        assert rank.backend.batch_get_v2([rank.transfer(rank.sides[0], keys(6), SIX)]) == {
            "swa": [False] * 6
        }
    # The same KV beside a window of another shape, but of as many bytes.
    kv = host_pools.mha_pool(layout="page_first")
    window = host_pools.mha_pool(layout="page_first", heads=2, layers=2, dim=4)
    backend = attach(kv, known=[("kv", kv), ("swa", window)])
    mine, theirs = (b._pools["swa"] for b in (backend, one.backend))
    assert mine.layout.tensor_sizes == theirs.layout.tensor_sizes
    assert mine.identity.family == theirs.identity.family
    assert mine.identity.fingerprint != theirs.identity.fingerprint


@pytest.mark.parametrize("refused", ["dummy_mla", "envelope", "interleaved"])
def test_a_pool_that_cannot_be_served(attach, caplog, refused):
    """Pinned: known at attach, it stops the attach; told afterwards, nothing is promised."""
    kv = host_pools.mha_pool(fill=56, layout="page_first")
    bad = getattr(side_pools, f"{refused}_pool")()
    with pytest.raises(ConfigError, match=r"indexer: host pool \w+ with layout 'page_first'"):
        attach(kv, known=[("kv", kv), ("indexer", bad)])
    assert "destroy" not in vars(kv)
    backend = attach(kv)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    assert not caplog.records
    backend.register_mem_host_pool_v2(bad, PoolName.INDEXER)
    backend.on_host_pools_registered()
    assert "can't store this model's side pool 'indexer'" in caplog.text
    one = host_pools.indices(kv, [0])
    assert backend.batch_set_v1(keys(1), one) == [True]
    side = [PoolTransfer(name=PoolName.INDEXER, keys=keys(1), host_indices=one)]
    assert backend.batch_exists_v2(keys(1), side).kv_hit_pages == 0
    assert backend.batch_exists(keys(1)) == 0
    assert backend.batch_get_v2(side) == backend.batch_set_v2(side) == {"indexer": [False]}


@pytest.mark.parametrize("name", STACKS)
def test_destroying_any_pool_closes_the_store_first(attach, name):
    """Pinned: SGLang destroys its pools one by one before it closes backends."""
    pools = Rank(attach, name).pools
    for victim in pools:
        rank = Rank(attach, name, fill=57)
        before = [pool for pool in rank.pools.values() if "destroy" in vars(pool)]
        assert len(before) == len(pools)
        rank.pools[victim].destroy()
        assert rank.backend.counters() == {}
        assert rank.exists(keys(1)).kv_hit_pages == 0
        assert not any("destroy" in vars(pool) for pool in rank.pools.values())


def test_attached_again(attach):
    """Pinned: a backend that is attached again has its pools anew, and finds what it stored."""
    rank = Rank(attach, "swa", fill=58)
    stored(rank, keys(6))
    backend = rank.backend
    for _ in range(2):
        backend.close()
        assert rank.exists(keys(6)).kv_hit_pages == 0
        side = rank.transfer(rank.sides[0], keys(1), [0])
        assert backend.batch_get_v2([side]) == {"swa": [False]}
        backend.register_mem_pool_host(rank.pools["kv"])
        assert rank.exists(keys(6)).kv_hit_pages == 6


def test_a_pool_whose_slots_are_others_now(attach):
    """Pinned: a pool registered again with other memory is served there, from the same pages."""
    rank = Rank(attach, "swa", fill=59)
    stored(rank, keys(6))
    old, number = rank.pools["swa"], rank.backend._pools["swa"].number
    rank.pools["swa"] = host_pools.mha_pool(layout="page_first", heads=1, layers=2)
    rank.register("swa")
    assert rank.backend._pools["swa"].number == number
    assert rank.exists(keys(6)).kv_hit_pages == 6
    assert all(all(answers) for answers in rank.load(keys(6), OTHERS).values())
    assert torch.equal(host_pools.page_bytes(old, SIX[5]), rank.page("swa", OTHERS[5]))


@pytest.mark.parametrize("known", [True, False])
def test_the_log_has_a_line_for_each_pool(attach, caplog, known):
    """Pinned: what is stored of a model, where, and by whom."""
    with caplog.at_level(logging.INFO, "cachestore"):
        rank = Rank(attach, "deepseek_v4", known=known)
    told = [r.message for r in caplog.records if " bytes in " in r.message]
    lines = [line for text in told for line in text.splitlines() if " bytes in " in line]
    assert len(lines) == len(rank.sides)
    for pool in rank.backend._pools.values():
        (line,) = (line for line in lines if f"pool {pool.name} (" in line)
        assert pool.identity.directory_name in line and "stored by" in line
    (summary,) = (text for text in told if "pipeline Cache|Posix" in text)
    assert len(told) == 1 or not known
    assert "memory: cache buffer: shared" in summary and "directories: " in summary


def test_updated_weights_end_the_use_of_all_pools(attach, monkeypatch):
    """Pinned (F22): after an update in place no pool's pages are used, or added."""
    from cachestore_connector import weights

    monkeypatch.setattr(weights, "updates", 0)
    rank = Rank(attach, "swa", fill=61)
    stored(rank, keys(6))
    weights.count_update()
    side = rank.transfer(rank.sides[0], keys(6), SIX)
    assert rank.exists(keys(6)).kv_hit_pages == 0
    assert rank.backend.batch_exists(keys(6)) == 0
    assert rank.backend.batch_get_v2([side]) == {"swa": [False] * 6}
    assert rank.backend.batch_set_v2([side]) == {"swa": [False] * 6}


def test_the_draft_models_weights_are_in_its_pools_identities(attach, monkeypatch, tmp_path):
    """Pinned (F22): pages of a draft model are those of its weights; the target's stay shared."""
    from cachestore_connector import backend as module

    drafts = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode() * 5000)
        spec = {"speculative_draft_model_path": str(tmp_path / name)}
        told = {"model": {"model_path": "/m"}, "spec": spec}
        monkeypatch.setattr(module, "_arguments", lambda told=told: told)
        kv, draft = (host_pools.mha_pool(layout="page_first", fill=62) for _ in "12")
        drafts.append(attach(kv, known=[("kv", kv), ("draft", draft)]))
    one, other = ({name: p.identity for name, p in b._pools.items()} for b in drafts)
    assert one["kv"] == other["kv"]
    assert one["draft"].family == other["draft"].family
    assert one["draft"].fingerprint != other["draft"].fingerprint
