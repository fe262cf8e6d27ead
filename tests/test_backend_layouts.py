"""Each kind of KV pool attached to the backend: pages through the store into other slots."""

import pytest
import torch

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
    with pytest.raises(ConfigError, match="holds no bytes of its own"):
        attach(side_pools.logical_pool(layout="page_first"))


@pytest.mark.parametrize("name", ["dummy_mla", "envelope", "interleaved"])
def test_foreign_pools_stop_the_attach(attach, name):
    """Pinned: refused where SGLang reports it, with the class and what is allowed."""
    with pytest.raises(ConfigError, match=r"host pool \w+ with layout 'page_first': .* only "):
        attach(getattr(side_pools, f"{name}_pool")())
