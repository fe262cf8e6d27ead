"""The backend on Cache|Posix: ranks that share a buffer, and what it does with SGLang's pages."""

import logging
import threading

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

import host_pools
from backends import blocks, counters_become, flip, keys
from cachestore_connector.errors import Code, ConfigError, StoreError
from cachestore_connector.store import Store
from process_state import comes_back_to, threads_and_descriptors

PAGES = [5, 1, 2, 7]
POOLS = {layout: (host_pools.mla_pool, {"layout": layout}) for layout in host_pools.FLAT_LAYOUTS}
POOLS |= {f"split-{name}": (host_pools.split_pool, to) for name, to in host_pools.SPLITS.items()}


@pytest.fixture
def rank(attach):
    """``rank(pool, tp_rank, **settings)``: an attached backend of an MLA model's rank."""

    def make(pool, tp_rank=0, *, tp_size=8, root=None, is_mla=True, **settings):
        return attach(
            pool, root=root, is_mla=is_mla, tp_rank=tp_rank, tp_size=tp_size, extra=settings
        )

    return make


def regions(tmp_path):
    return sorted(tmp_path.glob("cachestore-region-*"))


def same(source, there, target, here):
    return all(
        torch.equal(host_pools.page_bytes(source, a), host_pools.page_bytes(target, b))
        for a, b in zip(there, here, strict=True)
    )


@pytest.mark.parametrize("pool", POOLS)
def test_pages_come_back_in_other_slots(rank, tmp_path, pool):
    """Pinned: from the buffer to another rank, and from the files after all have gone."""
    make, changes = POOLS[pool]
    source, target, later = make(fill=1, **changes), make(**changes), make(**changes)
    names = keys(4)
    writer, reader = rank(source), rank(target, 1)
    assert writer.pipeline == "Cache|Posix"
    assert len(regions(tmp_path)) == 1
    assert reader.batch_exists(names) == 0
    assert writer.batch_set_v1(names, host_pools.indices(source, PAGES)) == [True] * 4
    assert reader.batch_exists([*names, "absent"]) == 4
    assert reader.batch_get_v1(names, host_pools.indices(target, [0, 6, 3, 2])) == [True] * 4
    assert same(source, PAGES, target, [0, 6, 3, 2])
    untouched = torch.zeros_like(host_pools.page_bytes(target, 1))
    for number in (1, 4, 5, 7):
        assert torch.equal(host_pools.page_bytes(target, number), untouched)
    counters_become([reader], cache_hit=4, storage_loads=0)
    # Closing stores what is pending, and the last one takes the buffer away.
    writer.close()
    reader.close()
    assert regions(tmp_path) == []
    assert len(blocks(tmp_path)) == 4
    again = rank(later, 2)
    assert again.batch_exists(names) == 4
    assert again.batch_get_v1(names, host_pools.indices(later, PAGES)) == [True] * 4
    assert same(source, PAGES, later, PAGES)
    counters_become([again], storage_loads=4, cache_loaded=4, cache_hit=0)


def test_ranks_read_each_page_once(rank):
    """Pinned: eight ranks load the same pages at once, and each page is read from storage once."""
    names = keys(8)
    source = host_pools.mla_pool(fill=2)
    writer = rank(source)
    writer.batch_set_v1(names, host_pools.indices(source, range(8)))
    writer.close()
    pools = [host_pools.mla_pool() for _ in range(8)]
    ranks = [rank(pool, number) for number, pool in enumerate(pools)]
    barrier, results = threading.Barrier(8), [None] * 8

    def load(number):
        barrier.wait(10)
        indices = host_pools.indices(pools[number], range(8))
        results[number] = ranks[number].batch_get_v1(names, indices)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [[True] * 8] * 8
    assert all(same(source, range(8), pool, range(8)) for pool in pools)
    counters_become(ranks, load_ok=64, storage_loads=8, cache_loaded=8, cache_direct=0)
    assert (
        sum(each.counters()["cache_hit"] + each.counters()["cache_waited"] for each in ranks) == 56
    )
    counters_become(ranks, load_outstanding=0, cache_slots_loading=0)


def test_damage_is_a_miss_and_heals(rank, tmp_path):
    """Pinned (F03, F04): a damaged page is a miss for every rank, and can be dumped again."""
    source, target = host_pools.mla_pool(fill=16), host_pools.mla_pool()
    names = keys(4)
    writer = rank(source)
    writer.batch_set_v1(names, host_pools.indices(source, PAGES))
    writer.close()
    for block in blocks(tmp_path):
        if block.name == writer.identity.block_id(names[1]).hex():
            flip(block)
    ranks = [rank(target, 0), rank(target, 1)]
    loaded = [each.batch_get_v1(names, host_pools.indices(target, PAGES)) for each in ranks]
    assert loaded == [[True, False, True, True]] * 2
    assert [each.batch_exists(names) for each in ranks] == [1, 1]
    counters_become(ranks, load_ok=6, load_corrupt=1, load_absent=1)
    again = rank(source, 2)
    assert again.batch_set_v1(names, host_pools.indices(source, PAGES)) == [True] * 4
    for each in ranks:
        assert each.batch_get_v1(names, host_pools.indices(target, PAGES)) == [True] * 4
        assert same(source, PAGES, target, PAGES)


def test_a_private_buffer(rank, tmp_path):
    """Pinned: share_buffer_enable false needs no shared memory (F21), and ranks share nothing."""
    names = keys(4)
    source = host_pools.mla_pool(fill=3)
    private = {"share_buffer_enable": False, "cache_buffer_directory": "/nowhere"}
    writer = rank(source, **private)
    writer.batch_set_v1(names, host_pools.indices(source, PAGES))
    writer.close()
    for number in range(2):
        pool = host_pools.mla_pool()
        reader = rank(pool, number, **private)
        for _ in range(2):
            assert reader.batch_get_v1(names, host_pools.indices(pool, PAGES)) == [True] * 4
        assert same(source, PAGES, pool, PAGES)
        counters_become([reader], storage_loads=4, cache_loaded=4, cache_hit=4)
    assert regions(tmp_path) == []


@pytest.mark.parametrize("writer", ["Posix", "Posix direct", "Cache|Posix", "Cache|Posix direct"])
def test_one_format_for_both_pipelines(rank, writer):
    """Pinned: either pipeline, with io_direct or without, reads what any other wrote."""
    ways = {
        name: {"store_pipeline": name.split()[0], "io_direct": "direct" in name}
        for name in ("Posix", "Posix direct", "Cache|Posix", "Cache|Posix direct")
    }
    names = keys(4)
    source = host_pools.split_pool(fill=4, index=8, scale=True)
    first = rank(source, **ways[writer])
    assert first.batch_set_v1(names, host_pools.indices(source, PAGES)) == [True] * 4
    first.close()
    for settings in ways.values():
        pool = host_pools.split_pool(index=8, scale=True)
        reader = rank(pool, 1, **settings)
        assert reader.identity.fingerprint == first.identity.fingerprint
        assert reader.batch_get_v1(names, host_pools.indices(pool, PAGES)) == [True] * 4
        assert same(source, PAGES, pool, PAGES)
        reader.close()


def test_what_the_storage_gets_is_k_v_and_zeroes(rank, tmp_path):
    """Pinned (contract A8, A10): the payload is K page, V page and zeroes up to 4096."""
    pool = host_pools.split_pool(fill=5)
    backend = rank(pool)
    assert backend.batch_set_v1(keys(1), host_pools.indices(pool, [6])) == [True]
    backend.close()
    (block,) = blocks(tmp_path)
    content = block.read_bytes()
    page = bytes(host_pools.page_bytes(pool, 6).numpy())
    assert page == bytes(pool.k_buffer[6].view(torch.uint8).numpy()) + bytes(
        pool.v_buffer[6].contiguous().view(torch.uint8).numpy()
    )
    assert content[:4096] == page + bytes(4096 - len(page))
    assert len(content) == 2 * 4096


def test_geometry_is_aligned(rank):
    """Pinned: a user's shard_size and block_size are the aligned ones, and nothing else."""
    for pool, payload in ((host_pools.mla_pool(), 1536), (host_pools.split_pool(), 1536)):
        assert sum(rank(pool)._layout.tensor_sizes) == payload
        rank(pool, shard_size=4096, block_size=4096).close()
        with pytest.raises(ConfigError, match=r"shard_size = 1536.*4096"):
            rank(pool, shard_size=1536)
    with pytest.raises(ConfigError, match=r"shard_size = 4096.*1536"):
        rank(pool, shard_size=4096, store_pipeline="Posix")
    rank(pool, tensor_size_list=[1152, 384]).close()


def test_an_mha_models_ranks_have_a_buffer_each(rank, tmp_path):
    """Pinned: a user's Cache|Posix works for MHA; ranks hold other bytes and share none."""
    names = keys(2)
    pools = [host_pools.mha_pool(fill=6 + number) for number in range(2)]
    ranks = [
        rank(pool, number, tp_size=2, is_mla=False, store_pipeline="Cache|Posix")
        for number, pool in enumerate(pools)
    ]
    assert len(regions(tmp_path)) == 2
    for each, pool in zip(ranks, pools, strict=True):
        assert each.batch_exists(names) == 0
        assert each.batch_set_v1(names, host_pools.indices(pool, [0, 1])) == [True] * 2
    for each, pool in zip(ranks, pools, strict=True):
        assert each.batch_get_v1(names, host_pools.indices(pool, [4, 5])) == [True] * 2
        assert same(pool, [0, 1], pool, [4, 5])


def test_clear_empties_the_buffer_too(rank, tmp_path):
    """Pinned: after one rank's clear no rank finds a page, here or in the storage."""
    pool = host_pools.mla_pool(fill=8)
    first, second = rank(pool), rank(pool, 1)
    names = keys(4)
    first.batch_set_v1(names, host_pools.indices(pool, PAGES))
    assert second.batch_exists(names) == 4
    first.clear()
    assert [each.batch_exists(names) for each in (first, second)] == [0, 0]
    assert second.batch_get_v1(names, host_pools.indices(pool, [0, 3, 4, 6])) == [False] * 4
    first.close()
    second.close()
    assert blocks(tmp_path) == []


@pytest.mark.parametrize("pipeline", ["Posix", "Cache|Posix"])
def test_what_comes_after_every_ranks_clear_is_stored(rank, tmp_path, pipeline):
    """Pinned: SGLang has every rank clear, and rank 0 stores: the others' clears are noticed."""
    pool = host_pools.mla_pool(fill=8)
    ranks = [rank(pool, number, store_pipeline=pipeline) for number in range(2)]
    names = keys(4)
    for _ in range(2):
        for each in ranks:
            each.clear()
        assert [each.batch_exists(names) for each in ranks] == [0, 0]
        assert ranks[0].batch_set_v1(names, host_pools.indices(pool, PAGES)) == [True] * 4
        assert [each.batch_exists(names) for each in ranks] == [4, 4]
    for each in ranks:
        each.close()
    assert len(blocks(tmp_path)) == 4


@pytest.mark.parametrize(
    ("gib", "parts"),
    [
        (2**20, ["wants 1073741824 MiB", "are available", "--shm-size="]),
        (1e-6, ["holds no page of 4096"]),
    ],
)
def test_a_size_that_does_not_fit_stops_the_attach(rank, tmp_path, gib, parts):
    """Pinned (F12): the error names the key, what it wants, what there is and what to do."""
    pool = host_pools.mla_pool()
    with pytest.raises(ConfigError) as refused:
        rank(pool, cache_buffer_capacity_gb=gib)
    for part in (f"cache_buffer_capacity_gb = {gib}", *parts):
        assert part in str(refused.value)
    assert regions(tmp_path) == []
    assert "destroy" not in vars(pool)
    rank(pool)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_use_host_buffer": False}, r"cache_use_host_buffer = false.*no device path"),
        ({"use_gdr": True}, r"use_gdr = true.*cache_use_host_buffer"),
        ({"gpu_kv_buffer_addrs": [1]}, r"gpu_kv_buffer_addrs = \[1\].*cache_use_host_buffer"),
        ({"cache_h2h_cpu_affinity": "60000"}, r'cache_h2h_cpu_affinity is "60000".*usable'),
        ({"cache_buffer_directory": "/nowhere"}, r"/nowhere"),
    ],
)
def test_wrong_settings_stop_the_attach(rank, tmp_path, settings, message):
    """Pinned (F32): the error names the key, or the path."""
    with pytest.raises((ConfigError, StoreError), match=message):
        rank(host_pools.mla_pool(), **settings)
    assert regions(tmp_path) == []


def test_what_was_got_is_logged(rank, caplog):
    """Pinned: whether the buffer is shared, made or joined; its size; huge pages."""
    with caplog.at_level(logging.INFO, "cachestore"):
        for number in range(2):
            rank(host_pools.mla_pool(), number)
    made, joined = [r.message for r in caplog.records if "cache buffer" in r.message]
    assert "shared, made" in made and "slots" in made and "huge pages" in made
    assert "shared, joined" in joined


def test_more_pages_than_the_queue_is_deep(rank):
    """Pinned (contract A4): a call of 300 pages is split, for a depth of 128, and succeeds."""
    pool = host_pools.mla_pool(fill=9, pages=300)
    backend = rank(pool, cache_h2h_queue_depth=128)
    names = keys(300)
    assert backend.batch_set_v1(names, host_pools.indices(pool, range(300))) == [True] * 300
    assert backend.batch_exists(names) == 300
    target = host_pools.mla_pool(pages=300)
    reader = rank(target, 1, cache_h2h_queue_depth=128)
    assert reader.batch_get_v1(names, host_pools.indices(target, range(300))) == [True] * 300
    assert same(pool, range(300), target, range(300))
    assert reader.counters()["load_refused"] == backend.counters()["dump_refused"] == 0


def test_a_buffer_smaller_than_a_batch(rank):
    """Pinned (F18): what finds no slot goes past the buffer; every page is stored and loaded."""
    pool, target = host_pools.mla_pool(fill=10, pages=64), host_pools.mla_pool(pages=64)
    small = {"cache_buffer_capacity_gb": 16 * 4096 / 2**30 + 1 / 8192}
    names = keys(64)
    writer, reader = rank(pool, **small), rank(target, 1, **small)
    assert writer.counters()["cache_slots"] < 64
    assert writer.batch_set_v1(names, host_pools.indices(pool, range(64))) == [True] * 64
    assert reader.batch_get_v1(names, host_pools.indices(target, range(64))) == [True] * 64
    assert same(pool, range(64), target, range(64))


def test_attach_and_detach_leave_nothing(rank, tmp_path):
    """Pinned: threads, descriptors and segments after each detach are as before."""
    pool = host_pools.mla_pool(fill=11)

    rank(pool).close()
    before = threads_and_descriptors()
    for _ in range(3):
        first, second = rank(pool), rank(pool, 1)
        first.batch_set_v1(keys(4), host_pools.indices(pool, PAGES))
        second.batch_get_v1(keys(4), host_pools.indices(pool, PAGES))
        assert threads_and_descriptors() != before
        first.close()
        second.close()
        assert comes_back_to(before)
        assert regions(tmp_path) == []


def test_flat_pages_share_blocks(rank):
    """Pinned: the legacy calls go through the buffer as well."""
    source, target = host_pools.mla_pool(fill=12), host_pools.mla_pool()
    backend = rank(source)
    names = keys(2)
    assert backend.batch_set(names, [source.get_data_page(p * source.page_size) for p in (0, 1)])
    reader = rank(target, 1)
    assert reader.batch_get_v1(names, host_pools.indices(target, [4, 5])) == [True] * 2
    assert same(source, [0, 1], target, [4, 5])
    flat = reader.batch_get([*names, "absent"])
    assert torch.equal(flat[0], host_pools.page_bytes(source, 0)) and flat[2] is None


def test_a_split_layout_has_no_flat_pages(rank, caplog):
    """Pinned: the legacy calls are misses, with the reason in the log; the others work."""
    pool = host_pools.split_pool(fill=13)
    backend = rank(pool)
    flat = torch.zeros(backend._layout.page_bytes, dtype=torch.uint8)
    assert backend.batch_set(keys(1), [flat]) is False
    assert backend.batch_get(keys(1)) == [None]
    assert "no flat page" in caplog.text
    assert backend.batch_set_v1(keys(1), host_pools.indices(pool, [0])) == [True]


def test_what_comes_before_is_passed_on(rank, monkeypatch):
    """Pinned: SGLang's prefix keys, else what a lookup told, else nothing."""
    pool = host_pools.mla_pool(fill=14)
    backend = rank(pool)
    seen = []
    true = {name: getattr(Store, name) for name in ("load", "dump")}

    def watch(name):
        def call(self, ids, addresses, sizes, parent_id=None, pool=0):
            seen.append(parent_id)
            return true[name](self, ids, addresses, sizes, parent_id, pool)

        return call

    for name in true:
        monkeypatch.setattr(Store, name, watch(name))
    names = keys(4)
    one = host_pools.indices(pool, [0])
    backend.batch_set_v1(names[:1], one)
    assert backend.batch_exists(names) == 1
    backend.batch_set_v1(names[1:2], one)
    backend.batch_get_v1(names[1:2], one, HiCacheStorageExtraInfo(prefix_keys=names[2:4]))
    backend.batch_get_v1(names[1:2], one, HiCacheStorageExtraInfo(prefix_keys=[]))
    backend.batch_get_v1(names[:1], one, HiCacheStorageExtraInfo())
    ids = [backend.identity.block_id(name) for name in names]
    assert seen == [None, ids[0], ids[3], ids[0], None]


def test_pieces_follow_each_other(rank, monkeypatch):
    """Pinned: of a call that is split, each part says what the part before ended with."""
    pool = host_pools.mla_pool(fill=15, pages=300)
    backend = rank(pool, cache_h2h_queue_depth=128)
    seen = []

    def note(self, start, batch, n, **_):
        parent = batch.parent_id
        seen.append(bytes(parent[0:16]) if parent else None)
        return [Code.OK] * n

    monkeypatch.setattr(Store, "_run", note)
    names = keys(300)
    backend.batch_set_v1(names, host_pools.indices(pool, range(300)))
    ids = [backend.identity.block_id(name) for name in names]
    assert seen == [None, ids[127], ids[255]]
