"""Page layouts against SGLang's own addresses, on its real host pools."""

import ctypes

import pytest
import torch

import host_pools
from cachestore_connector.pages import LAYOUTS, LayoutError, page_layout

POOLS = [
    pytest.param(host_pools.mha_pool, layout, {}, id=f"mha-{layout}") for layout in LAYOUTS
] + [pytest.param(host_pools.mla_pool, layout, {}, id=f"mla-{layout}") for layout in LAYOUTS] + [
    pytest.param(host_pools.mha_pool, "page_first_direct", {"v_dim": 4}, id="mha-unequal-kv"),
    pytest.param(host_pools.mha_pool, "page_first", {"pages": 1}, id="mha-one-page"),
    pytest.param(host_pools.mla_pool, "page_first", {"pages": 2}, id="mla-two-pages"),
]  # fmt: skip


def _read(address, size):
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8)


@pytest.mark.parametrize(("make", "layout", "changes"), POOLS)
def test_addresses_are_the_pools_own(make, layout, changes):
    """Pinned: our computed addresses equal get_page_buffer_meta's, page by page, in any order."""
    pool = make(layout=layout, **changes)
    learnt = page_layout(pool)
    wanted = [p for p in (5, 0, 7, 3, 3) if p < pool.page_num]
    indices = host_pools.indices(pool, wanted)
    addresses, sizes = pool.get_page_buffer_meta(indices)
    assert learnt.addresses(indices, len(wanted)).ravel().tolist() == addresses
    assert list(learnt.tensor_sizes) * len(wanted) == sizes
    assert learnt.page_count == pool.page_num


@pytest.mark.parametrize(("make", "layout", "changes"), [p for p in POOLS if "unequal" not in p.id])
def test_a_flat_page_has_the_tensors_where_we_say(make, layout, changes):
    """Pinned: SGLang's flat page and our tensors are the same bytes, tensor by tensor."""
    pool = make(layout=layout, fill=3, **changes)
    learnt = page_layout(pool)
    number = pool.page_num - 1
    flat = host_pools.page_bytes(pool, number)
    (in_pool,) = learnt.addresses(host_pools.indices(pool, [number]), 1)
    for tensor, size in enumerate(learnt.tensor_sizes):
        ours = _read(int(in_pool[tensor]), size)
        theirs = _read(learnt.flat_addresses(flat.data_ptr())[tensor], size)
        assert torch.equal(ours, theirs), f"tensor {tensor}"


def test_wrong_indices_are_refused():
    """Pinned: a short list, a page that starts amid a page, and one past the pool's end."""
    pool = host_pools.mha_pool()
    learnt = page_layout(pool)
    whole = host_pools.indices(pool, [1, 2])
    for bad in (whole[:-1], whole + 1, whole + pool.size, whole - 2 * pool.page_size):
        with pytest.raises(ValueError, match="host indices"):
            learnt.addresses(bad, 2)
    assert learnt.addresses(whole[:0], 0).shape == (0, 2)


def _without_bytes(pool):
    pool.kv_buffer = None


def _shared(pool):
    pool.shared_allocation_domain = object()


def _envelope(pool):
    pool.stores_page_envelope = True


def _dcp(pool):
    pool.dcp_size = 2


def _page_head(pool):
    pool.layout = "page_head"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_bytes, "holds no bytes of its own"),
        (_shared, "shared between ranks"),
        (_envelope, "page-envelope"),
        (_dcp, "DCP"),
        (_page_head, "layout 'page_head' is not supported"),
    ],
)
def test_what_cannot_be_stored_is_refused(change, message):
    """Pinned: a pool that isn't plain pages is refused in words, not stored wrongly."""
    pool = host_pools.mha_pool()
    change(pool)
    with pytest.raises(LayoutError, match=message):
        page_layout(pool)


def test_addresses_that_are_not_linear_are_refused():
    """Pinned: the rule that makes addresses computable is checked, not assumed."""
    pool = host_pools.mha_pool()
    true_meta = pool.get_page_buffer_meta

    def crooked(indices):
        addresses, sizes = true_meta(indices)
        return [a + (64 if indices[0] // pool.page_size > 3 else 0) for a in addresses], sizes

    pool.get_page_buffer_meta = crooked
    with pytest.raises(LayoutError, match="doesn't lie as page 0 and 1 do"):
        page_layout(pool)
