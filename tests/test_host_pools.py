"""Every host pool class of SGLang: its pages through our description, and through its own code."""

import ctypes
import itertools
import pkgutil
from importlib import import_module

import numpy as np
import pytest
import torch

import host_pools
import pool_table
import side_pools
from cachestore_connector.pages import page_layout
from cachestore_connector.pool_tensors import DESCRIBED, LayoutError, Offers, tensors_of

# Every class and what varies in its pages beside the layout: label (of the dtype column) -> pool.
KINDS = {
    "MHATokenToKVPoolHost": (
        host_pools.mha_pool,
        {
            "bfloat16": {},
            "float16": {"dtype": torch.float16},
            "uint8 (fp8)": {"dtype": torch.uint8, "dim": 16},
            "float8_e4m3fn": {"dtype": torch.float8_e4m3fn, "dim": 16},
            "bfloat16, packed drafts": {"drafts": 2},
        },
    ),
    "AsymmetricMHATokenToKVPoolHost": (
        host_pools.mha_pool,
        {"bfloat16": {"v_dim": 4}, "uint8 (fp8)": {"v_dim": 4, "dtype": torch.uint8}},
    ),
    "MLATokenToKVPoolHost": (
        host_pools.mla_pool,
        {
            "bfloat16": {},
            "uint8 (packed fp8 rows)": {"dtype": torch.uint8, "row": 32},
            "bfloat16, packed drafts": {"drafts": 2},
        },
    ),
    "MHATokenToKOnlyPoolHost": (
        side_pools.key_only_pool,
        {"bfloat16": {}, "float8_e4m3fn": {"dtype": torch.float8_e4m3fn}},
    ),
    "DSAIndexerPoolHost": (
        side_pools.dsa_pool,
        {
            "uint8": {},
            "uint8, some layers": {"with_index": (0, 2)},
            "uint8, packed drafts": {"drafts": 2},
        },
    ),
    "MambaPoolHost": (
        side_pools.mamba_pool,
        {
            "float32+bfloat16": {},
            "float32+bfloat16, side states": {"states": True},
            "bfloat16, no temporal state": {"temporal": False},
            "float32+bfloat16, packed drafts": {"drafts": 1},
        },
    ),
    "DeepSeekV4PagedHostPool": (side_pools.paged_pool, {"uint8": {}, "uint8, odd": {"item": 7}}),
    "DeepSeekV4StateHostPool": (side_pools.state_pool, {"uint8": {}}),
    "QSAIndexerPoolHost": (
        side_pools.qsa_pool,
        {"uint8": {}, "uint8, packed drafts": {"drafts": 1}},
    ),
    "MiniMaxM3Nvfp4MainKVPoolHost": (
        side_pools.nvfp4_pool,
        {"uint8, 3 layers": {}, "uint8, 1 layer": {"layers": 1}},
    ),
    "MiniMaxM3Nvfp4IndexKPoolHost": (side_pools.nvfp4_index_pool, {"uint8": {}}),
    "MHATokenToKVPoolMXFP8Host": (side_pools.mxfp8_pool, {"float8_e4m3fn": {}}),
    "HiSparseMHATokenToKVPoolHost": (side_pools.hisparse_pool, {"bfloat16": {}}),
    "LogicalHostPool": (side_pools.logical_pool, {"none": {}}),
}
MADE_BY_HAND = ("MHATokenToKVPoolMXFP8Host", "HiSparseMHATokenToKVPoolHost")
EVERY = [
    pytest.param(kind, layout, dtype, id=f"{kind}-{layout}-{dtype}")
    for kind, (_, varieties) in KINDS.items()
    for layout in host_pools.LAYOUTS
    for dtype in varieties
]


def _make(kind, layout, dtype, **more):
    make, varieties = KINDS[kind]
    return make(layout=layout, **varieties[dtype], **more)


def _indices(pool, pages):
    return host_pools.indices(pool, pages)


def _bytes_at(address, size):
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))


def _gather(layout, pool, number, order=None):
    """A page's bytes through our description."""
    (row,) = layout.addresses(_indices(pool, [number]), 1)
    order = range(len(row)) if order is None else order
    parts = [_bytes_at(row[i], layout.tensor_sizes[i]) for i in order]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _scatter(layout, pool, number, page):
    (row,) = layout.addresses(_indices(pool, [number]), 1)
    at = 0
    for address, size in zip(row, layout.tensor_sizes, strict=True):
        _bytes_at(address, size)[:] = page[at : at + size]
        at += size


def _sglangs(pool, number):
    """SGLang's flat page."""
    flat = pool.get_data_page(number * pool.page_size, flat=True)
    return flat.contiguous().view(torch.uint8).numpy()


def _own_rows(pool, number):
    """A page from the buffers, by their shapes: of the pools that SGLang has no flat page of.

    All have pages or their tokens first, but MHA's K and V in one buffer.
    """
    parts = []
    for buffer in host_pools.buffers(pool):
        halves = [buffer]
        if "MXFP8" in type(pool).__name__ and buffer is pool.kv_buffer:
            halves = list(buffer)
        for half in halves:
            rows = pool.page_size if half.shape[0] == pool.size else 1
            parts.append(half[number * rows : (number + 1) * rows])
    return np.concatenate([part.contiguous().view(torch.uint8).numpy().ravel() for part in parts])


def _random_page(generator, size):
    return generator.integers(0, 256, size, dtype=np.uint8)


def _check(pool, other):
    """All that a pool's pages must be; ``other`` is one of its kind, with zeros in it."""
    layout = page_layout(pool)
    offers = tensors_of(pool).offers
    if type(pool).__name__ == "LogicalHostPool":
        assert layout.tensor_sizes == () and layout.page_bytes == 0
        assert layout.addresses(_indices(pool, [0, 3]), 2).shape == (2, 0)
        return "works: slots without bytes"
    _covers_once(pool, layout)
    if Offers.META in offers:
        _says_as_sglang(pool, layout)
    _round_trip(pool, other, layout, flat=Offers.FLAT in offers)
    checked = [name for name in ("META", "FLAT") if Offers[name] in offers]
    words = {"META": "SGLang's addresses", "FLAT": "SGLang's flat page"}
    against = " and ".join(words[name] for name in checked) or "the buffers alone"
    return f"works: {len(layout.tensor_sizes)} tensors, checked against {against}"


def _covers_once(pool, layout):
    """All pages' tensors together are the pool's buffers, each byte once, nothing outside."""
    rows = layout.addresses(_indices(pool, range(layout.page_count)), layout.page_count)
    spans = sorted(
        (int(address), int(address) + size)
        for row in rows
        for address, size in zip(row, layout.tensor_sizes, strict=True)
    )
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start, "tensors overlap"
    left = 0
    for buffer in host_pools.buffers(pool):
        first, last = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        inside = [span for span in spans if first <= span[0] < last]
        assert all(end <= last for _, end in inside), "a tensor reaches beyond its buffer"
        left += buffer.nbytes - sum(end - start for start, end in inside)
        spans = [span for span in spans if span not in set(inside)]
    assert not spans, "a tensor outside of the pool's buffers"
    # The DSA indexer's buffer has a page more than the pool.
    spare = layout.page_bytes if type(pool).__name__ == "DSAIndexerPoolHost" else 0
    assert left == spare


def _says_as_sglang(pool, layout):
    wanted = np.random.default_rng(5).permutation(layout.page_count).tolist()
    addresses, sizes = pool.get_page_buffer_meta(_indices(pool, wanted))
    said = [(int(a), int(s)) for a, s in zip(addresses, sizes, strict=True) if s]
    ours = layout.addresses(_indices(pool, wanted), len(wanted)).ravel().tolist()
    assert ours == [address for address, _ in said]
    assert list(layout.tensor_sizes) * len(wanted) == [size for _, size in said]


def _round_trip(pool, other, layout, flat):
    """Bytes that SGLang wrote are read, and what is written elsewhere is read by SGLang."""
    generator = np.random.default_rng(7)
    read = _sglangs if flat else _own_rows
    pages = [_random_page(generator, layout.page_bytes) for _ in range(layout.page_count)]
    for number, page in enumerate(pages):
        if flat:
            # In the flat page's type: a float is copied bit by bit between equal types.
            kind = pool.get_data_page(0).dtype
            pool.set_from_flat_data_page(
                number * pool.page_size, torch.from_numpy(page.copy()).view(kind)
            )
        else:
            _scatter(layout, pool, number, page)
    for number, page in enumerate(pages):
        assert np.array_equal(_gather(layout, pool, number, layout.flat_order), page)
        assert np.array_equal(read(pool, number), page)
    # Into the slots of another pool, in another order; one slot is left.
    there = page_layout(other)
    last = layout.page_count - 1
    for number in range(last):
        _scatter(there, other, last - number, _gather(layout, pool, number))
    for number in range(last):
        assert np.array_equal(read(other, last - number), pages[number])
    assert not read(other, 0).any()


def _reason(error, layout):
    """Why SGLang doesn't build a pool, in words that don't differ by layout."""
    if isinstance(error, AttributeError):
        return "needs the split buffers of an NPU"
    return str(error).replace(f"'{layout}'", "this one").replace(layout, "this one")


@pytest.mark.parametrize(("kind", "layout", "dtype"), EVERY)
def test_every_pool(kind, layout, dtype, request):
    """Pinned: each pool that SGLang builds is described, byte by byte; the table says which."""
    row = (request.config, kind, layout, dtype)
    try:
        pool = _make(kind, layout, dtype)
    except (ValueError, AssertionError, NotImplementedError, AttributeError) as error:
        pool_table.add(*row, f"not built by SGLang: {_reason(error, layout)}")
        # The split layout of MLA wants other device pools: those of `test_every_split_pool`.
        assert layout not in DESCRIBED[kind] or layout == "page_first_kv_split"
        return
    assert type(pool).__name__ == kind
    pool_table.add(*row, "FAILS")
    outcome = _check(pool, _make(kind, layout, dtype))
    if kind in MADE_BY_HAND:
        outcome += " (made by hand: its constructor wants a GPU)"
    pool_table.add(*row, outcome)


@pytest.mark.parametrize("name", host_pools.SPLITS)
def test_every_split_pool(name, request):
    """Pinned: the same of the pages of Ascend, whose parts lie in buffers of their own."""
    made = [host_pools.split_pool(**host_pools.SPLITS[name]) for _ in range(2)]
    row = (request.config, "MLATokenToKVPoolHost", "page_first_kv_split", name)
    pool_table.add(*row, "FAILS")
    pool_table.add(*row, _check(*made))


@pytest.mark.parametrize("head_groups", [1, 2, 4])
def test_unified_pages_of_head_groups(head_groups):
    """Pinned: a page_unified page is one range, however its heads are grouped."""
    make = {"layout": "page_unified", "heads": 4, "head_groups": head_groups}
    pool = host_pools.mha_pool(**make)
    assert _check(pool, host_pools.mha_pool(**make)).startswith("works: 1 tensors")
    assert page_layout(pool).page_bytes == pool.page_unified_layout.bytes_per_page


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_split_heads(chunks):
    """Pinned: a page_head page cut by heads is SGLang's own pieces; a chunk holds its heads."""
    pool = host_pools.mha_pool(layout="page_head", heads=4, fill=21)
    layout = page_layout(pool, split=chunks)
    wanted = [5, 0, 7]
    indices = _indices(pool, wanted)
    addresses, sizes = pool.get_split_heads_page_buffer_meta(indices, chunks)
    assert layout.addresses(indices, 3).ravel().tolist() == addresses
    assert list(layout.tensor_sizes) * 3 == sizes
    _covers_once(pool, layout)
    number = 5
    assert np.array_equal(_gather(layout, pool, number, layout.flat_order), _sglangs(pool, number))
    heads = 4 // chunks
    for chunk in range(chunks):
        part = layout.chunk(chunk, chunks)
        assert len(part.tensor_sizes) == 2 and part.page_count == layout.page_count
        held = pool.kv_buffer[:, number, chunk * heads : (chunk + 1) * heads].contiguous()
        assert np.array_equal(_gather(part, pool, number), held.view(torch.uint8).numpy().ravel())


def test_a_chunk_of_few_large_heads_is_that_of_many():
    """Pinned: the same heads are the same chunk, whether a rank has four of them or two."""
    whole = host_pools.mha_pool(layout="page_head", heads=4, fill=22)
    halves = [host_pools.mha_pool(layout="page_head", heads=2) for _ in range(2)]
    for number, half in enumerate(halves):
        half.kv_buffer.copy_(whole.kv_buffer[:, :, 2 * number : 2 * number + 2])
    cut = page_layout(whole, split=2)
    for number, half in enumerate(halves):
        ours = page_layout(half, split=1)
        mine = _gather(cut.chunk(number, 2), whole, 6)
        assert np.array_equal(mine, _gather(ours.chunk(0, 1), half, 6))


@pytest.mark.parametrize(
    ("make", "split", "message"),
    [
        ({"layout": "page_head", "heads": 4}, 3, r"4 heads can't be cut into 3 equal chunks"),
        ({"layout": "page_head", "heads": 4}, 0, r"4 heads can't be cut into 0"),
        ({"layout": "page_first"}, 2, r"layout 'page_first': only page_head can be split"),
    ],
)
def test_what_cannot_be_split_is_refused(make, split, message):
    """Pinned: a split that would cut a head, or pages that don't lie by heads."""
    with pytest.raises(LayoutError, match=message):
        page_layout(host_pools.mha_pool(**make), split=split)


def _dcp():
    return host_pools.mla_pool(
        layout="page_first", dcp_size=2, dcp_rank=0, page_size=2 * host_pools.PAGE
    )


def _shared():
    pool = host_pools.mha_pool(layout="page_first")
    pool.shared_allocation_domain = object()
    return pool


REFUSED = {
    "KV sharding": (
        side_pools.interleaved_pool,
        r"PageInterleaveHostPool.*shard_size is 2.*only 1",
    ),
    "page envelopes": (
        side_pools.envelope_pool,
        r"UnifiedPageEnvelopeHostPool.*'page_first'.*stores_page_envelope is True.*only False",
    ),
    "MLA host dedup": (side_pools.dummy_mla_pool, r"MLATokenToKVPoolHost.*_is_dummy is True"),
    "DCP": (_dcp, r"MLATokenToKVPoolHost.*dcp_size is 2.*only 1 is"),
    "shared domain": (_shared, r"MHATokenToKVPoolHost.*shared_allocation_domain is of type object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_pools(name, request):
    """Pinned: whose pages aren't a rank's own, or move, is refused: by class, value and remedy."""
    make, message = REFUSED[name]
    pool = make()
    with pytest.raises(LayoutError, match=message) as raised:
        page_layout(pool)
    row = (request.config, type(pool).__name__, pool.layout, name)
    pool_table.add(*row, "refused: " + str(raised.value).split(": ", 1)[1])


@pytest.mark.parametrize("kind", DESCRIBED)
def test_a_destroyed_pool_is_refused_in_words(kind):
    """Pinned: whatever a pool lacks, or its methods raise, comes out as a LayoutError."""
    layout = next(name for name in DESCRIBED[kind] if name != "page_first_kv_split")
    pool = _make(kind, layout, next(iter(KINDS[kind][1])))
    for name in host_pools._BUFFERS:
        if name in vars(pool):
            setattr(pool, name, None)
    if kind == "LogicalHostPool":
        del pool.size
    with pytest.raises(LayoutError, match=f"host pool {kind} with layout '{layout}'"):
        page_layout(pool)


def test_no_class_of_sglang_is_forgotten():
    """Pinned: SGLang's host pool classes are described or refused, all of them."""
    import sglang.srt.mem_cache.memory_pool_host as pools
    from sglang.srt.mem_cache import pool_host

    for module in pkgutil.iter_modules(pool_host.__path__):
        import_module(f"{pool_host.__name__}.{module.name}")

    def below(kind):
        return {kind} | {each for sub in kind.__subclasses__() for each in below(sub)}

    found = {
        kind.__name__
        for kind in below(pool_host.HostKVCache)
        if kind.__module__.startswith("sglang.") and kind is not pool_host.HostKVCache
    }
    assert found >= {"MambaPoolHost", "QSAIndexerPoolHost"} and pools.LogicalHostPool
    assert found - set(DESCRIBED) == {"UnifiedPageEnvelopeHostPool"}
    assert set(DESCRIBED) - found == {"LogicalHostPool"}
    assert set(KINDS) == set(DESCRIBED)


def test_a_page_of_other_strides_is_refused():
    """Pinned: a buffer whose pages lie in pieces, or that ends too soon, isn't believed."""
    pool = host_pools.mla_pool(layout="page_first_direct")
    pool.kv_buffer = pool.kv_buffer.transpose(1, 2)
    with pytest.raises(LayoutError, match="lies in pieces"):
        page_layout(pool)
    pool = host_pools.mla_pool(layout="page_first_direct")
    pool.page_num += 1
    with pytest.raises(LayoutError, match="8 rows can't hold 9 pages of 1"):
        page_layout(pool)
