"""SGLang's own storage path with our backend, for models that can't be served on a CPU."""

import collections
import importlib
from pathlib import Path

import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry

import host_pools
import side_pools
from backends import blocks, counters_become, flip
from cachestore_connector import plugin
from host_pools import PAGE
from hybrid_controllers import KINDS, Server, joined, prefetched, published
from pool_stacks import Side

SIX = list(range(1000, 1000 + 6 * PAGE))  # the tokens of six pages
ENDS = [3, 6]  # pages: where its nodes end


@pytest.fixture(scope="module", autouse=True)
def hooked():
    """Our plugin's hooks, set by SGLang's registry; afterwards SGLang is as it was."""
    with pytest.MonkeyPatch.context() as patch, published():
        patch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
        patch.setattr(HookRegistry, "_patched", set())
        patch.setattr(plugin, "_install_async_load", lambda: None)  # no part of this
        for target in plugin._PARAMETERS:
            module, owner, method = target.rsplit(".", 2)
            owner = getattr(importlib.import_module(module), owner)
            patch.setattr(owner, method, vars(owner)[method])
        plugin.register()
        HookRegistry.apply_hooks()
        yield


@pytest.fixture
def server(tmp_path):
    """``server(name, seed=..., ...)``: one rank; detached after the test."""
    made = []

    def make(name, *, root=tmp_path / "store", **given):
        made.append(Server(name, root, **given))
        return made[-1]

    yield make
    for one in made:
        one.detach()


def chain(number, pages=6):
    """The tokens of so many pages, which no other chain begins with."""
    return list(range(10000 * number, 10000 * number + pages * PAGE))


def stored(one, tokens=SIX, ends=ENDS):
    """Store a chain; SGLang must say that all of it was."""
    done = one.store(tokens, ends)
    assert sum(operation.completed_tokens for operation in done) == len(tokens)
    return one


def needed(one, pages):
    """The pages of each pool that a prefix of so many needs."""
    windows = {side.name: side.window for side in one.stack.sides}
    firsts = {name: max(0, pages - (windows.get(name) or pages)) for name in one.pools}
    return {name: set(range(first, pages)) for name, first in firsts.items()}


def check(reader, writer, pages, tokens=SIX):
    """What the reader's tree holds is a prefix, all that it needs, and what the writer stored."""
    here, there = reader.held(tokens), writer.held(tokens)
    assert {name: set(slots) for name, slots in here.items()} == needed(reader, pages)
    for name, slots in here.items():
        for page, number in slots.items():
            mine, theirs = reader.page(name, number), writer.page(name, there[name][page])
            assert torch.equal(mine, theirs), (name, page)


def free(one):
    """How many slots are free in each pool that has its own."""
    return [one.pools[name].available_size() for name in one.components.values()]


def has_windows(name):
    return any(side.window for side in KINDS[name].sides)


@pytest.mark.parametrize("prefix_keys", [False, True], ids=["", "prefix keys"])
@pytest.mark.parametrize("name", KINDS)
def test_a_restart(server, name, prefix_keys):
    """Pinned: backed up by SGLang's thread, prefetched by another server's into other slots.

    All bytes of all pools, and no other byte of them.
    """
    writer = stored(server(name, seed=1, prefix_keys=prefix_keys))
    writer.detach()
    reader = server(name, seed=100, prefix_keys=prefix_keys)
    before = reader.everything()
    assert reader.prefetch([*SIX, *range(2 * PAGE + 3)]) == len(SIX)
    check(reader, writer, 6)
    assert reader.operation.hash_value == writer.hashes(SIX)
    held, there = reader.held(SIX), writer.held(SIX)
    for pool, slots in held.items():
        assert slots != {page: there[pool][page] for page in slots}
    after = reader.everything()
    for pool, slots in held.items():
        for number in {*range(reader.pages)} - {*slots.values()}:
            assert torch.equal(before[pool][number], after[pool][number]), (pool, number)
    # What PD decode asks, without saying for which pools.
    assert reader.tree.query_storage_hit_length(reader.root, SIX) == len(SIX)


@pytest.mark.parametrize("name", ["dsa", "deepseek_v4", "mla_hybrid"])
def test_more_than_one_batch(server, name):
    """Pinned: SGLang cuts a node's KV into batches of 128 pages, and its side pools not at all."""
    tokens, given = chain(1, 300), {"pages": 300, "prefix_keys": True}
    writer = stored(server(name, seed=2, **given), tokens, [290, 300])
    writer.detach()
    reader = server(name, seed=102, **given)
    assert reader.prefetch(tokens) == len(tokens)
    check(reader, writer, 300, tokens)


@pytest.mark.parametrize("name", KINDS)
def test_shorter_prompts(server, name):
    """Pinned: a prompt is served up to where every pool can serve it, and no further."""
    writer, reader = server(name, seed=3), server(name, seed=103)
    for pages in range(1, 6):
        stored(writer, chain(pages))
        expected = pages if not has_windows(name) else 3 if pages >= 3 else 0
        assert reader.prefetch(chain(pages, pages)) == expected * PAGE
        check(reader, writer, expected, chain(pages))


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_part(server, tmp_path, name, damage):
    """Pinned (F03): a prefetch ends where every pool is whole, or loads nothing; never else.

    What is gone, the query finds; a flipped bit only the load does. SGLang then keeps what is
    before it, or all or nothing where there are windows or states. Each pool has a chain.
    """
    kind, legal = KINDS[name], 3 if has_windows(name) else 4
    first = 0 if has_windows(name) and damage is flip else legal
    damaged = {side.name: 5 if side.window else 4 for side in kind.sides}
    if kind.anchor is not side_pools.logical_pool:
        damaged["kv"] = 4
    chains = {pool: chain(number) for number, pool in enumerate(damaged)}
    writer = server(name, seed=4)
    for tokens in chains.values():
        stored(writer, tokens)
    writer.detach()  # and with it what is only in memory
    readers = [server(name, seed=seed) for seed in (104, 204)]
    for pool, tokens in chains.items():
        path = readers[0].block(tmp_path / "store", pool, writer.hashes(tokens)[damaged[pool]])
        damage(path)
        # The second time, what was found damaged isn't promised again.
        for reader, expected in zip(readers, (first, legal), strict=True):
            before = free(reader)
            assert reader.prefetch(tokens) == expected * PAGE, pool
            check(reader, writer, expected, tokens)
            assert expected or free(reader) == before
        assert not path.exists()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_missing_is_stored_again(server, tmp_path, name):
    """Pinned: what was recomputed of a page is stored anew; its other parts stay as they are."""
    writer = stored(server(name, seed=5))
    writer.detach()
    again = server(name, seed=5)
    pools, key = again.backend._pools, writer.hashes(SIX)[5]
    lost, *others = [again.block(tmp_path / "store", pool, key) for pool in pools]
    written = [path.stat().st_ino for path in others]
    lost.unlink()
    stored(again)
    again.detach()
    assert lost.exists() and [path.stat().st_ino for path in others] == written
    reader = server(name, seed=105)
    assert reader.prefetch(SIX) == len(SIX)
    check(reader, writer, 6)


# Models of several tensor-parallel ranks: the pools of which each rank has a part.
PARTS = {"mla_hybrid": ["mamba", "draft"], "minimax": ["kv"], "mamba": ["kv", "mamba"]}


def ranks_of(server, name, seed):
    """Two ranks of a model. What isn't each one's own is the same, in the same slots."""
    pair = [server(name, seed=seed, rank=rank, size=2) for rank in range(2)]
    for pool in PARTS[name]:
        host_pools.filled(pair[1].pools[pool], seed + 50)
    return pair


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 first", "rank 1 first"])
@pytest.mark.parametrize("name", PARTS)
def test_two_ranks(server, tmp_path, monkeypatch, name, first):
    """Pinned (F23, F25): what all ranks hold is stored by rank 0 alone, each one's part by each.

    SGLang would leave an MLA model's MHA draft pool to rank 0, and have each rank store MiniMax's
    index keys.
    """
    writers = ranks_of(server, name, 6)
    dumped = [{pool: 6 for pool in writers[0].pools}, {pool: 6 for pool in PARTS[name]}]
    for each in dumped:
        if "mamba" in each:
            each["mamba"] = len(ENDS)
    for rank in (first, 1 - first):
        done = writers[rank].store(SIX, ENDS)
        assert [operation.completed_tokens for operation in done] == [3 * PAGE, 3 * PAGE]
        counters_become([writers[rank].backend], dump_requested=sum(dumped[rank].values()))
    is_mla = KINDS[name].is_mla
    assert [writer.controller.backup_skip for writer in writers] == [False, is_mla]
    held = collections.Counter()
    for rank, writer in enumerate(writers):
        for pool, pages in dumped[rank].items():
            held[writer.backend._pools[pool].identity.directory_name] += pages
        writer.detach()
    assert len(held) == len(dumped[0]) + len(dumped[1])
    assert collections.Counter(path.parents[2].name for path in blocks(tmp_path)) == held
    readers = joined(ranks_of(server, name, 106), monkeypatch)
    assert prefetched(readers, SIX) == [len(SIX)] * 2
    for reader, writer in zip(readers, writers, strict=True):
        check(reader, writer, 6)
    for pool in PARTS[name]:
        parts = [reader.page(pool, reader.held(SIX)[pool][5]) for reader in readers]
        assert not torch.equal(*parts)


@pytest.mark.parametrize("split", [False, True], ids=["gathered", "layers split"])
def test_two_context_ranks(server, tmp_path, monkeypatch, split):
    """Pinned: with context parallelism one stores what all hold, and each its own layers.

    SGLang itself has the first one store alone.
    """

    def layers_split(pools):
        pools["kv"]._layer_shard_enabled = split
        pools["indexer"].device_pool.layer_shard_enabled = split

    def pair(seed):
        return [
            server("dsa", seed=seed + 50 * split * rank, rank=rank, size=2, contexts=True,
                   prepare=layers_split)
            for rank in range(2)
        ]  # fmt: skip

    writers = pair(11)
    for rank in (1, 0):
        done = writers[rank].store(SIX, ENDS)
        stores = split or rank == 0
        assert sum(operation.completed_tokens for operation in done) == stores * len(SIX)
        counters_become([writers[rank].backend], dump_requested=stores * 2 * 6)
        writers[rank].detach()
    assert len(blocks(tmp_path)) == (1 + split) * 2 * 6
    readers = joined(pair(111), monkeypatch)
    assert prefetched(readers, SIX) == [len(SIX)] * 2
    for reader, writer in zip(readers, writers, strict=True):
        check(reader, writer, 6)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize(
    ("name", "pool"), [("mla_hybrid", "mamba"), ("mla_hybrid", "draft"), ("minimax", "kv")]
)
def test_ranks_agree(server, tmp_path, monkeypatch, name, pool, damage):
    """Pinned: what one rank lost of its part, no rank restores; both end where both can."""
    writers = [stored(writer) for writer in ranks_of(server, name, 7)]
    for writer in writers:
        writer.detach()
    readers = joined(ranks_of(server, name, 107), monkeypatch)
    damage(readers[1].block(tmp_path / "store", pool, writers[1].hashes(SIX)[5]))
    legal = 3 if has_windows(name) else 5
    for expected in (0, legal) if legal == 3 and damage is flip else (legal,):
        assert prefetched(readers, SIX) == [expected * PAGE] * 2
        for reader, writer in zip(readers, writers, strict=True):
            check(reader, writer, expected)


@pytest.mark.parametrize("name", KINDS)
def test_detached_and_attached_again(server, name):
    """Pinned: detach ends threads and store and lets go of the pools; attach finds what was stored.

    Each attach chooses the calls without copies.
    """
    one = stored(server(name, seed=8))
    controller = one.controller
    for number in range(1, 3):
        assert controller.page_get_func == controller._page_get_zero_copy
        assert controller.page_set_func == controller._page_set_zero_copy
        one.detach()
        assert controller.storage_backend is None and not controller.backup_thread.is_alive()
        assert not any("destroy" in vars(pool) for pool in one.pools.values())
        assert one.attach() == (True, "Attached HiCache storage backend successfully.")
        stored(one, chain(number))
    reader = server(name, seed=108)
    for tokens in (SIX, chain(1), chain(2)):
        reader.detach()
        assert reader.attach()[0]
        assert reader.prefetch(tokens) == len(tokens)
        check(reader, one, 6, tokens)


def test_a_pool_that_cannot_be_stored(server, monkeypatch):
    """Pinned: an attach that is refused leaves SGLang without a backend, and says why."""
    one = server("dsa", seed=9)
    one.detach()
    entry = one.controller.mem_pool_host.entry_map["indexer"]
    with monkeypatch.context() as patch:
        patch.setattr(entry, "host_pool", side_pools.envelope_pool())
        worked, why = one.attach()
    assert not worked and "indexer: host pool UnifiedPageEnvelopeHostPool" in why
    assert one.controller.storage_backend is None and not one.controller.enable_storage
    assert "destroy" not in vars(one.pools["kv"])
    assert one.attach()[0]


def test_a_draft_models_pool_that_comes_late(server):
    """Pinned: registered after the attach, it is stored and restored; pages without it aren't."""

    def with_draft(seed):
        one = server("dsa", seed=seed)
        pool = host_pools.mla_pool(layers=1, pages=one.pages, fill=seed + 1000)
        one.add(Side("draft", host_pools.mla_pool), pool)
        return one

    stored(server("dsa", seed=10), chain(1))
    writer, reader = stored(with_draft(11)), with_draft(110)
    assert reader.prefetch(chain(1)) == 0
    assert reader.prefetch(SIX) == len(SIX)
    check(reader, writer, 6)


@pytest.mark.parametrize(("depth", "pages"), [(128, 300)])
@pytest.mark.parametrize("name", ["dsa", "deepseek_v4"])
def test_a_node_longer_than_the_queue(server, name, depth, pages):
    """Pinned: a node that is longer than the queue is stored whole."""
    tokens = chain(1, pages)
    given = {"pages": pages, "posix_queue_depth": depth, "cache_buffer_capacity_gb": 1 / 8}
    writer = stored(server(name, seed=2, **given), tokens, [pages])
    writer.detach()
    reader = server(name, seed=102, **given)
    assert reader.prefetch(tokens) == len(tokens)
    check(reader, writer, pages, tokens)
