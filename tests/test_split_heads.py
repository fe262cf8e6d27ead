"""`tp_lcm_size`: pages written at one tensor-parallel size are read at another, head by head."""

import itertools

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

import host_pools
from backends import blocks, flip, keys
from cachestore_connector.errors import ConfigError

LCM, HEADS, PAGES = 4, 8, 6
SIZES = (1, 2, 4)


def rank_pool(size, fill=None, **geometry):
    """A rank's pool at a TP size: its share of `HEADS`."""
    return host_pools.mha_pool(layout="page_head", heads=HEADS // size, fill=fill, **geometry)


def whole(seed, **geometry):
    """All heads' pages: (K and V, page, head, token, layer, element)."""
    return rank_pool(1, fill=seed, **geometry).kv_buffer.clone()


def same(one, other):
    """Bit by bit: random bytes hold NaN."""
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def cut(buffer, size, rank):
    return buffer.chunk(size, dim=2)[rank]


class Ranks:
    """All ranks of one size, each with its pool and its backend."""

    def __init__(self, attach, size, content=None, lcm=LCM, swa=None, **changes):
        self.pools, self.swa_pools, self.backends = [], [], []
        for rank in range(size):
            pool, known = rank_pool(size), []
            self.pools.append(pool)
            if content is not None:
                pool.kv_buffer.copy_(cut(content, size, rank))
            if swa is not None:
                side = rank_pool(size, layers=2)
                side.kv_buffer.copy_(cut(swa, size, rank))
                self.swa_pools.append(side)
                known = [("kv", pool), ("swa", side)]
            split = {"tp_lcm_size": lcm, "should_split_heads": bool(lcm) and lcm > size}
            self.backends.append(
                attach(pool, tp_rank=rank, tp_size=size, known=known or None, **split, **changes)
            )

    def store(self, names):
        for pool, backend in zip(self.pools, self.backends, strict=True):
            indices = host_pools.indices(pool, range(len(names)))
            assert backend.batch_set_v1(names, indices) == [True] * len(names)

    def exist(self, names):
        """What SGLang makes of all ranks' answers."""
        return min(backend.batch_exists(names) for backend in self.backends)

    def load(self, names, numbers):
        for pool, backend in zip(self.pools, self.backends, strict=True):
            indices = host_pools.indices(pool, numbers)
            assert backend.batch_get_v1(names, indices) == [True] * len(names)
        return torch.cat([pool.kv_buffer for pool in self.pools], dim=2)

    def close(self):
        for backend in self.backends:
            backend.close()


@pytest.mark.parametrize("written", SIZES)
def test_pages_of_one_size_are_read_at_the_others(attach, tmp_path, written):
    """Pinned: every size of SGLang's `should_split_heads` shares all pages, byte by byte."""
    content, names = whole(70), keys(PAGES)
    Ranks(attach, written, content).store(names)
    stored = blocks(tmp_path)
    assert len(stored) == LCM * PAGES
    for size in SIZES:
        readers = Ranks(attach, size)
        assert readers.exist([*names, *keys(1, 50)]) == PAGES
        there = [7, 0, 5, 2, 1, 3]
        got = readers.load(names, there)
        assert same(got[:, there], content[:, :PAGES])
        readers.store(names)  # it is all there
        readers.close()
    assert blocks(tmp_path) == stored


def test_windows_are_split_as_kv_is(attach):
    """Pinned: a sliding window's pool in the same layout is shared between the sizes too."""
    content, window, names = whole(71), whole(72, layers=2), keys(PAGES)

    def transfer(pool, numbers):
        indices = None if pool is None else host_pools.indices(pool, numbers)
        return PoolTransfer(
            PoolName.SWA,
            keys=names[-2:],
            host_indices=indices,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    writers = Ranks(attach, 4, content, swa=window)
    writers.store(names)
    for pool, backend in zip(writers.swa_pools, writers.backends, strict=True):
        assert backend.batch_set_v2([transfer(pool, [4, 5])]) == {PoolName.SWA: [True, True]}
    readers = Ranks(attach, 2, swa=torch.zeros_like(window))
    for pool, backend in zip(readers.swa_pools, readers.backends, strict=True):
        hits = backend.batch_exists_v2(names, [transfer(None, [])])
        assert hits.restorable_prefix_pages == [PAGES]
        assert backend.batch_get_v2([transfer(pool, [1, 0])]) == {PoolName.SWA: [True, True]}
    got = torch.cat([pool.kv_buffer for pool in readers.swa_pools], dim=2)
    assert same(got[:, [1, 0]], window[:, [4, 5]])


def test_a_page_is_there_when_all_its_chunks_are(attach, tmp_path):
    """Pinned: of a page with a chunk missing or damaged nothing is reported, or loaded as right."""
    names = keys(PAGES)
    Ranks(attach, 4, whole(73)).store(names)
    reader = Ranks(attach, 1)
    (backend,) = reader.backends
    for damaged, page in ((1, 4), (3, 2)):
        identity = backend._pools["kv"].parts[damaged].identity
        name = identity.block_id(names[page]).hex()
        (path,) = (
            each
            for each in blocks(tmp_path)
            if each.name == name and identity.directory_name in str(each)
        )
        flip(path)
        indices = host_pools.indices(reader.pools[0], range(PAGES))
        got = backend.batch_get_v1(names, indices)
        assert got == [each not in (page, 4) for each in range(PAGES)]
        assert backend.batch_exists(names) == page
    assert backend.counters()["load_ok"] == 2 * LCM * PAGES - 3


def test_what_is_not_the_same_is_not_shared(attach):
    """Pinned (F22): another LCM, or none, is another set of pages, also where chunks are as big."""
    names = keys(2)
    Ranks(attach, 2, whole(74)).store(names)
    assert Ranks(attach, 2).exist(names) == 2
    for size, lcm in ((2, 8), (4, None), (2, None), (2, 2)):
        assert Ranks(attach, size, lcm=lcm).exist(names) == 0


def test_only_page_head_is_split(attach):
    """Pinned: with any other layout, or of an MLA model, `tp_lcm_size` changes nothing."""
    for make, layout, is_mla in (
        (host_pools.mha_pool, "page_first", False),
        (host_pools.mla_pool, "page_first", True),
    ):
        pool = make(layout=layout, fill=75)
        names = keys(2, 10 * is_mla)
        attach(pool, is_mla=is_mla).batch_set_v1(names, host_pools.indices(pool, [0, 1]))
        assert attach(pool, is_mla=is_mla, tp_lcm_size=LCM).batch_exists(names) == 2


def test_heads_that_cannot_be_cut_stop_the_attach(attach):
    """Pinned (F32): said at attach, with both numbers."""
    pool = host_pools.mha_pool(layout="page_head", heads=2)
    with pytest.raises(ConfigError, match=r"page_head.*2 heads can't be cut into 4 equal chunks"):
        attach(pool, tp_lcm_size=LCM, should_split_heads=True)


def test_flat_pages_are_the_same_blocks(attach):
    """Pinned: SGLang's generic calls find what the calls without copies stored, and the reverse."""
    content, names = whole(76), keys(3)
    ranks = Ranks(attach, 1, content)
    (backend,), (pool,) = ranks.backends, ranks.pools
    page = host_pools.PAGE
    assert backend.batch_set(names, [pool.get_data_page(i * page) for i in range(3)])
    readers = Ranks(attach, 2)
    assert same(readers.load(names, range(3))[:, :3], content[:, :3])
    for i, got in enumerate(backend.batch_get(names)):
        assert torch.equal(got, pool.get_data_page(i * page).view(torch.uint8).flatten())


def test_chunks_of_all_sizes_belong_to_one_family(attach):
    """Pinned: each chunk has one identity, whichever rank of whichever size stores it."""
    found = {}
    for size in SIZES:
        parts = [
            part.identity
            for backend in Ranks(attach, size).backends
            for part in backend._pools["kv"].parts
        ]
        assert len({part.family for part in parts}) == 1
        found[size] = [part.fingerprint for part in parts]
    assert len(set(found[1])) == LCM
    for one, other in itertools.pairwise(SIZES):
        assert found[one] == found[other]
