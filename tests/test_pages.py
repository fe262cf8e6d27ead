"""Page layouts against SGLang's own addresses, on its real host pools."""

import ctypes

import pytest
import torch

import host_pools
from cachestore_connector.pages import LayoutError, layout_name, page_layout
from cachestore_connector.pool_tensors import LAYOUTS

FLAT = [
    pytest.param(getattr(host_pools, f"{kind}_pool"), {"layout": layout}, id=f"{kind}-{layout}")
    for kind in ("mha", "mla")
    for layout in host_pools.FLAT_LAYOUTS
] + [
    pytest.param(host_pools.mha_pool, {"layout": "page_first", "pages": 1}, id="mha-one-page"),
    pytest.param(host_pools.mla_pool, {"layout": "page_first", "pages": 2}, id="mla-two-pages"),
]
SPLIT = [
    pytest.param(host_pools.split_pool, changes, id=f"split-{name}")
    for name, changes in host_pools.SPLITS.items()
]
POOLS = [
    *FLAT,
    *SPLIT,
    pytest.param(
        host_pools.mha_pool, {"layout": "page_first_direct", "v_dim": 4}, id="mha-unequal-kv"
    ),
]


def test_every_layout_is_tried():
    """Pinned: a layout that is added is added to the pools of the tests."""
    assert set(host_pools.LAYOUTS) == set(LAYOUTS)


def _read(address, size):
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8)


@pytest.mark.parametrize(("make", "changes"), POOLS)
def test_addresses_are_the_pools_own(make, changes):
    """Pinned: our computed addresses equal get_page_buffer_meta's, page by page, in any order."""
    pool = make(**changes)
    learnt = page_layout(pool)
    wanted = [p for p in (5, 0, 7, 3, 3) if p < pool.page_num]
    indices = host_pools.indices(pool, wanted)
    addresses, sizes = pool.get_page_buffer_meta(indices)
    assert learnt.addresses(indices, len(wanted)).ravel().tolist() == addresses
    assert list(learnt.tensor_sizes) * len(wanted) == sizes
    assert learnt.page_count == pool.page_num


@pytest.mark.parametrize(("make", "changes"), FLAT)
def test_a_flat_page_has_the_tensors_where_we_say(make, changes):
    """Pinned: SGLang's flat page and our tensors are the same bytes, tensor by tensor."""
    pool = make(fill=3, **changes)
    learnt = page_layout(pool)
    number = pool.page_num - 1
    flat = host_pools.page_bytes(pool, number)
    (in_pool,) = learnt.addresses(host_pools.indices(pool, [number]), 1)
    for tensor, size in enumerate(learnt.tensor_sizes):
        ours = _read(int(in_pool[tensor]), size)
        theirs = _read(learnt.flat_addresses(flat.data_ptr())[tensor], size)
        assert torch.equal(ours, theirs), f"tensor {tensor}"


@pytest.mark.parametrize(("make", "changes"), SPLIT)
def test_a_split_page_is_k_v_index_and_scale(make, changes):
    """Pinned (contract A8): number, order and sizes are the pool's: V is gone for packed FP8."""
    pool = make(fill=4, **changes)
    learnt = page_layout(pool)
    names = ["k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer"]
    held = [
        getattr(pool, name)
        for name in names
        if getattr(pool, name) is not None
        and not (name == "v_buffer" and pool.dsa_kv_cache_store_fp8)
    ]
    assert (
        len(held) == 2 + ("index" in changes) + ("scale" in changes) - pool.dsa_kv_cache_store_fp8
    )
    assert learnt.tensor_sizes == tuple(buffer[0].nbytes for buffer in held)
    (page,) = learnt.addresses(host_pools.indices(pool, [3]), 1)
    for address, buffer in zip(page, held, strict=True):
        bytes_there = buffer[3].contiguous().view(torch.uint8).ravel()
        assert torch.equal(_read(int(address), buffer[3].nbytes), bytes_there)


def test_a_split_page_has_no_flat_one():
    """Pinned: SGLang can't make a flat page of this layout, and so we offer none."""
    pool = host_pools.split_pool()
    with pytest.raises(ValueError, match="Unsupported layout"):
        pool.get_data_page(0)
    with pytest.raises(ValueError, match=r"no flat page.*interface_v1"):
        page_layout(pool).flat_addresses(4096)


def test_empty_tensors_are_left_out():
    """Pinned: a stage without index layers has an index of no bytes, which isn't a tensor."""
    pool = host_pools.split_pool(index=8)
    whole = page_layout(pool)
    pool.index_k_buffer = pool.index_k_buffer[:, :0]
    learnt = page_layout(pool)
    assert learnt.tensor_sizes == whole.tensor_sizes[:2]
    indices = host_pools.indices(pool, [5])
    assert (learnt.addresses(indices, 1) == whole.addresses(indices, 1)[:, :2]).all()


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


def _page_tail(pool):
    pool.layout = "page_tail"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_bytes, "holds no bytes of its own"),
        (_shared, "shared between ranks"),
        (_envelope, "page-envelope"),
        (_dcp, "DCP"),
        (_page_tail, r"layout 'page_tail': this layout is not supported; use .* page_first_direct"),
    ],
)
def test_what_cannot_be_stored_is_refused(change, message):
    """Pinned: a pool that isn't plain pages is refused in words, not stored wrongly."""
    pool = host_pools.mha_pool()
    change(pool)
    with pytest.raises(LayoutError, match=message):
        page_layout(pool)


def _crooked(pool):
    true_meta = pool.get_page_buffer_meta

    def crooked(indices):
        addresses, sizes = true_meta(indices)
        return [a + (64 if indices[0] // pool.page_size > 3 else 0) for a in addresses], sizes

    pool.get_page_buffer_meta = crooked
    return pool


def test_addresses_that_sglang_tells_otherwise_are_refused():
    """Pinned: what we say of the buffers is checked against the pool's own word, not assumed."""
    with pytest.raises(LayoutError, match="page 4 doesn't lie where the others say"):
        page_layout(_crooked(host_pools.mha_pool()))


def _of_unknown_class(pool, **attributes):
    pool.__class__ = type("NewHostPool", (type(pool),), attributes)
    return pool


def test_an_unknown_class_is_learnt_from_its_own_word():
    """Pinned: a class that isn't known is believed where its pages are linear and whole."""
    known = page_layout(host_pools.mha_pool())
    pool = _of_unknown_class(host_pools.mha_pool())
    learnt = page_layout(pool)
    assert (learnt.tensor_sizes, learnt.page_count) == (known.tensor_sizes, known.page_count)
    indices = host_pools.indices(pool, [6, 2])
    assert learnt.addresses(indices, 2).ravel().tolist() == pool.get_page_buffer_meta(indices)[0]
    assert learnt.flat_order is None
    with pytest.raises(LayoutError, match=r"NewHostPool.*page 4 doesn't lie where"):
        page_layout(_crooked(pool))


def test_an_unknown_class_whose_word_leaves_bytes_out_is_refused():
    """Pinned: scales beside K and V, say, of which the base class knows nothing."""
    pool = host_pools.mha_pool()
    flat = pool.get_data_page(0)
    pool.get_data_page = lambda index, flat=True, page=flat: torch.cat([page, page[:4]])
    with pytest.raises(LayoutError, match="a flat page has 3080 bytes, and its tensors 3072"):
        page_layout(_of_unknown_class(pool))


def test_layouts_whose_bytes_differ_have_names_that_differ():
    """Pinned: heads in groups are bytes in another order, though the sizes are the same."""
    made = [
        host_pools.mha_pool(layout="page_unified", heads=4, head_groups=groups)
        for groups in (1, 2, 4)
    ]
    assert [layout_name(pool) for pool in made] == [
        "page_unified",
        "page_unified-2-groups",
        "page_unified-4-groups",
    ]
    assert layout_name(host_pools.mla_pool(layout="layer_first")) == "layer_first"


def _raising(name):
    def method(self, *_, **__):
        raise NotImplementedError(f"no {name} of a new pool")

    return method


def test_an_unknown_class_without_addresses_is_staged():
    """Pinned: a pool that only copies its pages itself is told apart, and gives no addresses."""
    pool = host_pools.mha_pool()
    staged = page_layout(_of_unknown_class(pool, get_page_buffer_meta=_raising("meta")))
    assert staged.staged is torch.bfloat16 and staged.tensor_sizes == (3072,)
    indices = host_pools.indices(pool, [6, 2])
    assert staged.first_slots(indices, 2).tolist() == [96, 32]
    with pytest.raises(ValueError, match="have no addresses"):
        staged.addresses(indices, 2)
    assert staged.flat_addresses(4096) == [4096]


@pytest.mark.parametrize("name", ["get_data_page", "set_from_flat_data_page"])
def test_an_unknown_class_with_neither_is_refused(name):
    """Pinned: neither addresses nor flat pages: refused in words, whatever the pool raised."""
    lacking = {"get_page_buffer_meta": _raising("meta"), name: None}
    with pytest.raises(LayoutError, match=r"NewHostPool .*(neither addresses|aren't bytes)"):
        page_layout(_of_unknown_class(host_pools.mha_pool(), **lacking))
