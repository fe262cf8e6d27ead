"""Restorable prefixes: against a model that tries every length, and SGLang's own file backend."""

import random

import numpy as np
import pytest

from cachestore_connector.prefix_hits import (
    ALL_PAGES,
    BLOCK_GROUPS,
    TRAILING_PAGES,
    PoolPages,
    leading_run,
    prefix_hits,
)


def _serves(pool, length):
    """Whether a pool alone can serve the first ``length`` pages."""
    if pool.policy == ALL_PAGES:
        wanted = range(length)
    elif pool.policy == TRAILING_PAGES:
        wanted = range(max(0, length - max(1, pool.window)), length)
    else:
        wanted = ()
    return all(page < len(pool.present) and pool.present[page] for page in wanted)


def _groups(pool, kv_pages):
    """Pages of the leading blocks of which every page of the group is there."""
    covered = 0
    if pool.block_pages <= 0 or pool.group_pages <= 0 or pool.group_pages > pool.block_pages:
        return 0
    while covered + pool.block_pages <= kv_pages:
        end = covered + pool.block_pages
        keys = range(end - pool.group_pages, end)
        if not all(page < len(pool.present) and pool.present[page] for page in keys):
            break
        covered = end
    return covered


def _model(kv_pages, pools):
    """Every length tried by itself: (kv_hit, extra, restorable)."""
    lengths = list(range(1, kv_pages + 1))
    extra = {"kv": kv_pages} if kv_pages else {}
    for pool in pools:
        if not lengths:
            break
        alone = [p for p in range(1, kv_pages + 1) if _serves(pool, p)]
        own = _groups(pool, kv_pages) if pool.policy == BLOCK_GROUPS else max(alone, default=0)
        if own:
            extra[pool.name] = own
        lengths = [p for p in lengths if p in alone]
    return max(lengths, default=0), extra, lengths


def _bits(chance, pages):
    # Mostly there or mostly absent, and often in runs, as nodes are stored whole.
    share = chance.choice((0.05, 0.5, 0.9, 0.99, 1))
    bits = []
    while len(bits) < pages:
        bits += [chance.random() < share] * chance.choice((1, 1, 2, 5))
    return bits[:pages]


def _pool(chance, number, pages, policies):
    return PoolPages(
        name=f"pool{number}",
        policy=chance.choice(policies),
        present=_bits(chance, pages if chance.random() < 0.8 else chance.randint(0, pages)),
        window=chance.choice((0, 1, 1, 2, 3, pages, pages + 2)),
        block_pages=chance.choice((-1, 0, 1, 2, 3, 5)),
        group_pages=chance.choice((0, 1, 1, 2, 3)),
    )


def _answer(hits):
    return hits.kv_hit_pages, hits.extra_pool_hit_pages, hits.restorable_prefix_pages


def test_every_length_tried_says_the_same():
    """Pinned: 20000 random stacks of pools, all policies, gaps, short answers and odd windows."""
    chance = random.Random(20)
    policies = (ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS)
    holes = 0
    for _ in range(20000):
        pages = chance.randint(0, 14)
        kv_pages = chance.choice((pages, chance.randint(0, pages)))
        pools = [_pool(chance, n, pages, policies) for n in range(chance.randint(0, 4))]
        wanted = _model(kv_pages, pools)
        assert _answer(prefix_hits(kv_pages, pools)) == wanted, (kv_pages, pools)
        holes += wanted[0] > len(wanted[2])
    assert holes > 500  # lengths with gaps between them are what a maximum would hide


@pytest.fixture
def file_backend(tmp_path, monkeypatch):
    """SGLang's file backend, and how to store pages of a pool in it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)

    def make(name):
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=False,
            model_name="served", extra_config={"enable_metadata_cache": False},
        )  # fmt: skip
        return HiCacheFile(config, str(tmp_path / name))

    return make


def _store(backend, keys, present, pool=None):
    for key, there in zip(keys, present, strict=False):
        if there:
            name = backend._get_component_key(key, *([] if pool is None else [pool]))
            with open(f"{backend.file_path}/{name}.bin", "wb"):
                pass


def test_sglangs_file_backend_says_the_same(file_backend):
    """Pinned: 400 random stacks of pools on real files, all three fields of the answer."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    chance = random.Random(21)
    names = [PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER, PoolName.DRAFT]
    for case in range(400):
        backend = file_backend(f"case{case}")
        pages = chance.randint(0, 12)
        keys = [f"{number:064x}" for number in range(pages)]
        kv = _bits(chance, pages)
        _store(backend, keys, kv)
        pools, transfers = [], []
        for name in chance.sample(names, chance.randint(0, 3)):
            pool = _pool(chance, 0, pages, (ALL_PAGES, TRAILING_PAGES))
            _store(backend, keys, pool.present, name)
            window = None if pool.policy == ALL_PAGES else ["__placeholder__"] * pool.window
            policy = PoolHitPolicy(pool.policy)
            transfers.append(PoolTransfer(name=name, keys=window, hit_policy=policy))
            pools.append(PoolPages(name, policy, pool.present, len(window or ())))
        theirs = backend.batch_exists_v2(keys, transfers)
        ours = prefix_hits(leading_run(kv), pools, kv_name=PoolName.KV)
        assert _answer(ours) == _answer(theirs), (kv, pools)


def test_of_a_logical_anchor_the_pools_alone_decide():
    """Pinned: without KV bytes the chain is as long as it is asked for."""
    pools = [PoolPages("c4", ALL_PAGES, [1, 1, 1, 0]), PoolPages("swa", TRAILING_PAGES, [0, 1, 0])]
    hits = prefix_hits(4, pools)
    assert _answer(hits) == (2, {"kv": 4, "c4": 3, "swa": 2}, [2])


def test_no_pool_is_looked_up_when_nothing_is_left():
    """Pinned: SGLang takes a pool that isn't in the answer as one without a verdict."""
    asked = []

    def pools():
        for name, present in (("a", [True]), ("b", [False]), ("c", [True])):
            asked.append(name)
            yield PoolPages(name, ALL_PAGES, present)

    assert _answer(prefix_hits(1, pools())) == (0, {"kv": 1, "a": 1}, [])
    assert asked == ["a", "b"]
    assert _answer(prefix_hits(0, pools())) == (0, {}, [])
    assert asked == ["a", "b"]


def test_groups_never_shorten_the_prefix():
    """Pinned: BLOCK_GROUPS is a second form of the pages; its verdict is its own."""
    present = [0, 0, 1, 0, 1, 1, 0, 1, 0]
    pool = PoolPages("compressed", BLOCK_GROUPS, present, block_pages=3, group_pages=1)
    hits = prefix_hits(9, [pool])
    assert hits.extra_pool_hit_pages == {"kv": 9, "compressed": 6}
    assert hits.restorable_prefix_pages == list(range(1, 10))


def test_an_unknown_policy_is_refused():
    """Pinned: a policy of a later SGLang isn't taken for one of these."""
    with pytest.raises(ValueError, match="pool x: hit policy 'some_pages' is not one of"):
        prefix_hits(1, [PoolPages("x", "some_pages", [True])])


def test_the_policies_are_sglangs():
    """Pinned: names as SGLang's, and none of its policies is left out."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    assert {str(p.value) for p in PoolHitPolicy} == {ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS}


def test_bits_may_come_as_an_array():
    """Pinned: what the store's lookup gives is taken as it is."""
    pool = PoolPages("swa", TRAILING_PAGES, np.array([0, 1, 1, 0, 1], dtype=np.uint8), window=2)
    assert _answer(prefix_hits(5, [pool]))[2] == [3]
