"""Models of several pools through the backend: what is stored, reported and restored, and where."""

from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from backends import blocks, counters_become, flip, keys
from pool_stacks import OTHERS, SIX, STACKS, WINDOW, Rank, at_once, stored

EVERY = [(name, layout) for name, stack in STACKS.items() for layout in stack.layouts]


def has_windows(rank):
    return any(side.window for side in rank.sides)


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = [damage_cut, flip, Path.unlink]


@pytest.mark.parametrize("known", [True, False], ids=["known", "told one by one"])
@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_every_pool_comes_back_in_other_slots(attach, tmp_path, name, layout, known):
    """Pinned: set, exists, get into other slots of other pools, byte by byte, by SGLang's view."""
    writer = Rank(attach, name, layout=layout, fill=40, known=known)
    names = keys(6)
    assert writer.exists(names).kv_hit_pages == 0
    stored(writer, names)
    reader = Rank(attach, name, layout=layout, known=known)
    hits = reader.exists([*names, *keys(2, 100)])
    assert hits.kv_hit_pages == 6
    assert hits.restorable_prefix_pages[-1] == 6
    got = reader.load(names, OTHERS)
    assert all(all(answers) for answers in got.values()), got
    for pool in reader.pools:
        first = {side.name: 6 - side.window for side in reader.sides if side.window}.get(pool, 0)
        for number, there in list(zip(OTHERS, SIX, strict=True))[first:]:
            assert reader.same_page(pool, number, writer, there), (pool, number)
        # Nothing else was touched.
        for number in {*range(8)} - {*OTHERS[first:]}:
            assert not reader.page(pool, number).any()
    # All parts of a page have one block id.
    pools = writer.backend._pools.values()
    (block_id,) = {pool.identity.block_id(names[5]) for pool in pools}
    directories = {pool.identity.directory_name for pool in pools}
    writer.backend.close()  # what is only in memory goes to files now
    parts = [path for path in blocks(tmp_path / "store") if path.name == block_id.hex()]
    assert {path.parents[2].name for path in parts} == directories


@pytest.mark.parametrize("name", ["swa", "mamba", "deepseek_v4"])
def test_prefixes_end_where_windows_do(attach, name):
    """Pinned: of sparse windows every end that all pools can serve is reported, and no other."""
    rank = stored(Rank(attach, name, fill=41), keys(6), ends=[3, 6])
    hits = rank.exists(keys(6))
    assert hits.restorable_prefix_pages == [3, 6]
    assert hits.kv_hit_pages == 6
    assert hits.extra_pool_hit_pages == dict.fromkeys(rank.pools, 6)
    assert rank.exists(keys(5)).restorable_prefix_pages == [3]
    assert rank.exists(keys(2)).kv_hit_pages == 0
    # SGLang's PD decode asks without saying for which pools (F31).
    assert rank.backend.batch_exists(keys(6)) == 6
    assert rank.backend.batch_exists(keys(5)) == 3
    assert rank.backend.batch_exists(keys(2)) == 0


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STACKS)
def test_a_damaged_part_is_a_shorter_prefix(attach, tmp_path, name, damage):
    """Pinned (decision 1, F03): False for that key of that pool, and the rest of the page stays.

    The prefix that is reported then ends where every pool has what it needs.
    """
    for at, side in enumerate(STACKS[name].sides):
        base, root = 10 * at, tmp_path / f"of-{side.name}"
        names = keys(6, base)
        rank = stored(Rank(attach, name, fill=42, root=root), names, ends=[3, 6])
        rank.backend.close()
        rank = Rank(attach, name, root=root)
        page = 5 if side.window else 4
        damage(rank.block(root, side.name, names[page]))
        got = rank.load(names, OTHERS)
        needed = range(6 - side.window if side.window else 0, 6)
        assert got.pop(side.name) == [each != page for each in needed]
        assert all(all(answers) for answers in got.values())
        hits = rank.exists(names)
        # Where windows end at 3 and 6, 3 is left; else the pages before the damaged one.
        assert hits.kv_hit_pages == (3 if has_windows(rank) else 4)
        assert hits.extra_pool_hit_pages["kv"] == 6
        assert rank.backend.batch_exists(names) == hits.kv_hit_pages
        # And it can be stored again.
        again = rank.transfer(side, [names[page]], [1])
        assert list(rank.backend.batch_set_v2([again]).values()) == [[True]]
        assert rank.exists(names).kv_hit_pages == 6
        rank.backend.close()  # and with it the buffer that the next one would share


@pytest.mark.parametrize("name", ["dsa", "swa", "mamba"])
def test_pages_without_their_kv_are_nothing(attach, name):
    """Pinned: side pools are stored first; what has no KV yet isn't reported."""
    rank = Rank(attach, name, fill=43)
    for side in rank.sides:
        transfer = rank.transfer(side, keys(6), SIX)
        assert rank.backend.batch_set_v2([transfer]) == {side.name: [True] * 6}
    assert rank.exists(keys(6)).restorable_prefix_pages == []
    assert rank.backend.batch_exists(keys(6)) == 0


def test_kv_alone_is_not_restorable(attach):
    """Pinned (F31): a model's KV whose side pool wasn't stored promises nothing, either way."""
    rank = Rank(attach, "dsa", fill=44)
    rank.backend.batch_set_v1(keys(6), rank.indices("kv", SIX))
    hits = rank.exists(keys(6))
    assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (0, [])
    assert hits.extra_pool_hit_pages == {"kv": 6}
    assert rank.backend.batch_exists(keys(6)) == 0
    assert rank.backend.batch_exists_v2(keys(6)).kv_hit_pages == 6  # without side pools, asked so


@pytest.mark.parametrize("known", [True, False])
def test_a_logical_anchor_has_every_page(attach, known):
    """Pinned: DeepSeek-V4's anchor has no bytes: its calls answer True, and cost nothing.

    The store's first pool is one that has every page, whatever is registered first: what belongs
    to a page is used when that one is.
    """
    rank = Rank(attach, "deepseek_v4", fill=45, known=known)
    first = {pool.number: name for name, pool in rank.backend._pools.items()}[0]
    assert first == "deepseek_v4_c4"
    one = rank.indices("kv", [3])
    assert rank.backend.batch_set_v1(keys(1), one) == [True]
    assert rank.backend.batch_get_v1(keys(1), one) == [True]
    assert rank.backend.counters()["dump_requested"] == 0
    empty = rank.pools["kv"].get_dummy_flat_data_page()
    assert rank.backend.batch_set(keys(1), [empty])
    assert rank.backend.batch_get(keys(1), [empty])[0] is empty
    assert rank.exists(keys(1)).kv_hit_pages == 0
    rank.backend.close()
    assert rank.backend.batch_get_v1(keys(1), one) == [False]


def test_a_long_node_is_stored_in_pieces(attach):
    """Pinned: SGLang doesn't cut a node for its side pools; the queue is shorter than the node."""
    names = keys(300)
    rank = Rank(attach, "dsa", fill=48, pages=300, extra={"posix_queue_depth": 128})
    (side,) = rank.sides
    numbers = list(range(299, -1, -1))
    transfer = rank.transfer(side, names, numbers)
    assert rank.backend.batch_set_v2([transfer]) == {"indexer": [True] * 300}
    reader = Rank(attach, "dsa", pages=300)
    got = reader.backend.batch_get_v2([reader.transfer(side, names, list(range(300)))])
    assert got == {"indexer": [True] * 300}
    for number in (0, 39, 40, 127, 128, 299):
        assert reader.same_page("indexer", number, rank, 299 - number)


def _transfer(name=PoolName.INDEXER, **given):
    return PoolTransfer(name=name, **given)


@pytest.mark.parametrize("call", ["batch_get_v2", "batch_set_v2"])
@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({}, []),
        ({"keys": keys(2)}, [False, False]),
        ({"host_indices": torch.arange(16)}, []),
        ({"keys": keys(2), "host_indices": torch.arange(16)}, [False, False]),
        ({"keys": keys(1), "host_indices": torch.arange(16) + 1}, [False]),
        ({"keys": keys(1), "host_indices": torch.arange(16) + 8 * 16}, [False]),
        ({"keys": keys(1), "host_indices": torch.arange(16.0)}, [False]),
        ({"keys": [3], "host_indices": torch.arange(16)}, [False]),
        ({"keys": keys(1), "host_indices": 7}, [False]),
        ({"name": PoolName.MAMBA, "keys": keys(1), "host_indices": torch.arange(1)}, [False]),
        ({"name": "nonsense", "keys": keys(1), "host_indices": torch.arange(16)}, [False]),
    ],
)
def test_nothing_raises_and_neighbours_are_served(attach, call, given, answer):
    """Pinned (decision 2, F26): one bool a key for nonsense too; the call's others are served."""
    rank = Rank(attach, "dsa", fill=49)
    stored(rank, keys(6))
    good = PoolTransfer(name=PoolName.KV, keys=keys(2), host_indices=rank.indices("kv", [7, 0]))
    bad = _transfer(**given)
    assert getattr(rank.backend, call)([bad, good]) == {bad.name: answer, "kv": [True, True]}
    assert rank.exists(keys(6)).kv_hit_pages == 6


def test_nonsense_questions_promise_nothing(attach):
    """Pinned: nothing is restorable of pools that aren't there, or by a policy that isn't known."""
    rank = Rank(attach, "swa", fill=50)
    stored(rank, keys(6))
    backend = rank.backend
    unknown = [_transfer(PoolName.MAMBA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    assert backend.batch_exists_v2(keys(6), unknown).restorable_prefix_pages == []
    odd = [_transfer(PoolName.SWA, hit_policy="some_pages")]
    assert backend.batch_exists_v2(keys(6), odd).kv_hit_pages == 0
    assert backend.batch_exists_v2([], None).kv_hit_pages == 0
    assert backend.batch_exists_v2([None], None).kv_hit_pages == 0
    assert backend.batch_get_v2([]) == backend.batch_set_v2([]) == {}
    assert backend.batch_get_v2(None) == backend.batch_set_v2(7) == {}
    assert backend.batch_get_v2([None, _transfer(keys=7)]) == {"indexer": []}
    # Whole groups of blocks never cut a prefix.
    groups = _transfer(
        PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=1
    )
    hits = backend.batch_exists_v2(keys(6), [groups])
    assert hits.kv_hit_pages == 6 and "swa" not in hits.extra_pool_hit_pages


def test_clear_is_of_all_pools_and_counters_are_one_set(attach, tmp_path):
    """Pinned: one store: clear forgets every pool's pages, and counters add up over the pools."""
    rank = Rank(attach, "swa", fill=51)
    stored(rank, keys(6), ends=[3, 6])
    counters_become([rank.backend], dump_ok=6 + 2 * WINDOW, dump_requested=6 + 2 * WINDOW)
    size = 6 * rank.backend._pools["kv"].layout.page_bytes
    size += 2 * WINDOW * rank.backend._pools["swa"].layout.page_bytes
    counters_become([rank.backend], dump_bytes=size)
    rank.load(keys(6), OTHERS)
    counters_become([rank.backend], load_ok=6 + WINDOW)
    assert len(blocks(tmp_path)) == 6 + 2 * WINDOW
    rank.backend.clear()
    assert blocks(tmp_path) == []
    assert rank.exists(keys(6)).extra_pool_hit_pages == {}
    stored(rank, keys(6))
    assert rank.exists(keys(6)).kv_hit_pages == 6


def test_all_calls_at_once(attach):
    """Pinned: SGLang's threads use all pools of one backend together; every answer is right."""
    rank = Rank(attach, "swa", fill=60, pages=16)
    names, there, here = keys(6), SIX, [n + 8 for n in range(6)]

    def dump():
        assert all(map(all, rank.store(names, there, [3, 6])))

    def look():
        assert rank.exists(names).kv_hit_pages in (0, 3, 6)
        assert rank.backend.batch_exists(names) in (*range(4), 6)

    def load():
        got = rank.load(names, here)
        for name, first in (("kv", 0), ("swa", 6 - WINDOW)):
            for page, ok in enumerate(got[name], first):
                assert not ok or rank.same_page(name, here[page], rank, there[page])

    assert at_once(dump, look, load) == []
    assert rank.exists(names).kv_hit_pages == 6
