"""Each kind of KV pool attached to the backend: pages through the store into other slots."""

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

import host_pools
import side_pools
from backends import keys
from cachestore_connector.errors import ConfigError

KV_POOLS = {
    "page_head": (host_pools.mha_pool, {"layout": "page_head"}),
    "page_unified": (host_pools.mha_pool, {"layout": "page_unified", "heads": 4}),
    "page_unified, groups": (
        host_pools.mha_pool,
        {"layout": "page_unified", "heads": 4, "head_groups": 2},
    ),
    "mla page_unified": (host_pools.mla_pool, {"layout": "page_unified"}),
    "unequal K and V": (host_pools.mha_pool, {"v_dim": 4}),
    "mxfp8": (side_pools.mxfp8_pool, {"layout": "page_first"}),
    "nvfp4 layer_first": (side_pools.nvfp4_pool, {"layout": "layer_first"}),
    "nvfp4, one layer": (side_pools.nvfp4_pool, {"layout": "page_first", "layers": 1}),
}


def _pages(pool, number):
    """A page's part of each buffer: of pools with K and V, pages or tokens on some axis."""
    for buffer in host_pools.buffers(pool):
        axis = next(axis for axis, n in enumerate(buffer.shape) if n in (pool.page_num, pool.size))
        rows = pool.page_size if buffer.shape[axis] == pool.size else 1
        yield buffer.view(torch.uint8).narrow(axis, number * rows, rows)


@pytest.mark.parametrize("name", KV_POOLS)
def test_pages_come_back_in_other_slots(attach, name):
    """Pinned: what is stored of a pool of each kind is loaded bit by bit, and only there."""
    make, given = KV_POOLS[name]
    source, target = make(fill=31, pages=11, **given), make(pages=11, **given)
    is_mla = "mla" in name
    backend, names = attach(source, is_mla=is_mla), keys(3)
    assert backend.batch_set_v1(names, host_pools.indices(source, [10, 0, 4])) == [True] * 3
    reader = attach(target, is_mla=is_mla)
    assert reader.batch_exists(names) == 3
    assert reader.batch_get_v1(names, host_pools.indices(target, [2, 10, 7])) == [True] * 3
    for there, here in ((10, 2), (0, 10), (4, 7)):
        for one, other in zip(_pages(source, there), _pages(target, here), strict=True):
            assert torch.equal(one, other) and one.any()
    assert not any(part.any() for part in _pages(target, 1))


def _only_flat(pool):
    """The pool as one of a class that isn't known, and tells no addresses."""
    pool.__class__ = type("NewHostPool", (type(pool),), {"get_page_buffer_meta": None})
    return pool


@pytest.mark.parametrize("layout", host_pools.FLAT_LAYOUTS)
def test_a_pool_without_addresses_is_served_by_copies(attach, caplog, layout):
    """Pinned: through SGLang's own flat pages, more than are copied at once, and counted."""
    source, target = (host_pools.mla_pool(layout=layout, pages=40, fill=f) for f in (33, None))
    caplog.set_level("WARNING", "cachestore")
    backend, names = attach(_only_flat(source), is_mla=True), keys(37)
    assert "NewHostPool aren't known" in caplog.text
    assert "staged_pages" not in backend.counters()
    assert backend.batch_set_v1(names, host_pools.indices(source, range(37))) == [True] * 37
    assert backend.counters()["staged_pages"] == 37
    reader = attach(_only_flat(target), is_mla=True)
    wanted = [*names[:20], "absent", *names[21:]]
    there = host_pools.indices(target, range(39, 2, -1))
    got = reader.batch_get_v1(wanted, there)
    assert got == [key != "absent" for key in wanted]
    for number, ok in enumerate(got):
        page = host_pools.page_bytes(target, 39 - number)
        assert torch.equal(page, host_pools.page_bytes(source, number)) if ok else not page.any()
    assert reader.counters()["staged_pages"] == 36
    assert reader.batch_get_v1(names, there[:-1]) == [False] * 37
    flat = reader.batch_get(names[:1])[0]
    assert torch.equal(flat, host_pools.page_bytes(source, 0))


def test_a_side_pool_without_addresses_is_served_by_copies(attach):
    """Pinned: a side pool of a class that isn't known is as well, of each rank for itself."""
    names = keys(20)

    def rank(number, fill):
        kv = host_pools.mla_pool(layout="page_first", pages=20, fill=fill)
        side = _only_flat(side_pools.dsa_pool(layout="page_first", pages=20, fill=fill))
        known = [("kv", kv), ("indexer", side)]
        backend = attach(kv, known=known, is_mla=True, tp_rank=number, tp_size=2)
        indices = host_pools.indices(side, range(20))
        transfer = PoolTransfer(name=PoolName.INDEXER, keys=names, host_indices=indices)
        return backend, side, transfer

    writer, source, transfer = rank(0, 35)
    assert writer.every_rank_stores("indexer")
    assert writer.batch_set_v2([transfer]) == {"indexer": [True] * 20}
    reader, target, transfer = rank(0, None)
    assert reader.batch_get_v2([transfer]) == {"indexer": [True] * 20}
    assert torch.equal(host_pools.page_bytes(target, 19), host_pools.page_bytes(source, 19))
    assert reader.counters()["staged_pages"] == writer.counters()["staged_pages"] == 20
    other, _, transfer = rank(1, None)
    assert other.batch_get_v2([transfer]) == {"indexer": [False] * 20}


def test_parts_of_a_staged_batch_are_linked(attach, monkeypatch):
    """Pinned: the page before each part is the last of the part before, as if it were one call."""
    pool = _only_flat(host_pools.mla_pool(pages=40, fill=34))
    backend, names = attach(pool, is_mla=True), keys(33)
    before, moved = [], backend._transfer

    def transfer(move, pool, part, addresses, extra_info):
        before.append((part[0], backend._key_before(part[0], extra_info)))
        return moved(move, pool, part, addresses, extra_info)

    monkeypatch.setattr(backend, "_transfer", transfer)
    assert all(backend.batch_set_v1(names, host_pools.indices(pool, range(33))))
    assert before == [(names[0], None), (names[16], names[15]), (names[32], names[31])]


def test_equal_sizes_of_unequal_order_are_not_shared(attach):
    """Pinned: pages of one size whose bytes lie in another order are other pages."""
    same = {"heads": 4}
    pools = [
        host_pools.mha_pool(layout="page_unified", **same),
        host_pools.mha_pool(layout="page_unified", head_groups=2, **same),
        host_pools.mha_pool(layout="page_head", **same),
        host_pools.mha_pool(layout="page_first", **same),
    ]
    prints = {attach(pool).identity.fingerprint for pool in pools}
    assert len(prints) == len(pools)


def test_a_pool_without_bytes_is_refused(attach):
    """Pinned: a logical anchor alone has nothing to store."""
    pool = side_pools.logical_pool(layout="page_first")
    with pytest.raises(ConfigError, match="holds no bytes of its own"):
        attach(pool, known=[("kv", pool)])


@pytest.mark.parametrize("name", ["dummy_mla", "envelope", "interleaved"])
def test_foreign_pools_stop_the_attach(attach, name):
    """Pinned: refused where SGLang reports it, with the class and what is allowed."""
    with pytest.raises(ConfigError, match=r"host pool \w+ with layout 'page_first': .* only "):
        attach(getattr(side_pools, f"{name}_pool")())
