"""SGLang's storage interface on real host pools: set, exists, get, and what may go wrong."""

import json
import logging
import threading

import pytest
import torch
from sglang.srt.observability.metrics_collector import StorageMetrics

import host_pools
from backends import blocks, keys
from cachestore_connector.errors import ConfigError
from host_pools import FLAT_LAYOUTS
from process_state import comes_back_to, threads_and_descriptors

MAKE = {"mha": host_pools.mha_pool, "mla": host_pools.mla_pool}


@pytest.mark.parametrize("layout", FLAT_LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_back_in_other_slots(attach, kind, layout):
    """Pinned: set, exists, get into other slots of another pool: every byte, by SGLang's view."""
    source = MAKE[kind](layout=layout, fill=1)
    target = MAKE[kind](layout=layout)
    writer = attach(source, is_mla=kind == "mla")
    names = keys(4)
    assert writer.batch_exists(names) == 0
    assert writer.batch_set_v1(names, host_pools.indices(source, [5, 1, 2, 7])) == [True] * 4
    assert writer.batch_exists(names) == 4
    reader = attach(target, is_mla=kind == "mla")
    assert reader.batch_exists([*names, "absent"]) == 4
    assert reader.batch_get_v1(names, host_pools.indices(target, [0, 6, 3, 2])) == [True] * 4
    for there, here in zip([5, 1, 2, 7], [0, 6, 3, 2], strict=True):
        assert torch.equal(
            host_pools.page_bytes(source, there), host_pools.page_bytes(target, here)
        )
    untouched = torch.zeros_like(host_pools.page_bytes(target, 1))
    for number in (1, 4, 5, 7):
        assert torch.equal(host_pools.page_bytes(target, number), untouched)


@pytest.mark.parametrize("layout", FLAT_LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_legacy_and_zero_copy_calls_share_pages(attach, kind, layout):
    """Pinned: what either way stored, the other way loads, byte for byte."""
    source = MAKE[kind](layout=layout, fill=2)
    target = MAKE[kind](layout=layout)
    backend = attach(source, is_mla=kind == "mla")
    names = keys(3)
    flat = [source.get_data_page(p * source.page_size) for p in range(3)]
    assert backend.batch_set(names[:2], flat[:2])
    assert backend.set(names[2], flat[2])
    reader = attach(target, is_mla=kind == "mla")
    assert reader.batch_get_v1(names, host_pools.indices(target, [4, 5, 6])) == [True] * 3
    for number in range(3):
        assert torch.equal(
            host_pools.page_bytes(source, number), host_pools.page_bytes(target, number + 4)
        )
    # And back: zero-copy stored, loaded flat into SGLang's dummies.
    more = keys(2, start=10)
    assert backend.batch_set_v1(more, host_pools.indices(source, [6, 7])) == [True] * 2
    dummies = [target.get_dummy_flat_data_page() for _ in range(3)]
    pages = reader.batch_get([*more, "absent"], dummies)
    assert pages[0] is dummies[0] and pages[2] is None
    for page, number in zip(pages, (6, 7), strict=False):
        target.set_from_flat_data_page(0, page)
        assert torch.equal(host_pools.page_bytes(source, number), host_pools.page_bytes(target, 0))
    alone = reader.get(more[0])
    assert alone.dtype == torch.uint8 and torch.equal(alone, pages[0].view(torch.uint8).ravel())
    assert reader.exists(more[0]) and not reader.exists("absent")
    assert reader.get("absent") is None


def test_one_bad_page_fails_alone(attach, tmp_path):
    """Pinned (decision 1): a damaged and an absent page are False; their neighbours are loaded."""
    pool = host_pools.mha_pool(fill=3)
    backend = attach(pool)
    names = keys(4)
    backend.batch_set_v1(names, host_pools.indices(pool, [0, 1, 2, 3]))
    (victim,) = (p for p in blocks(tmp_path) if p.name == backend.identity.block_id(names[1]).hex())
    victim.write_bytes(victim.read_bytes()[:-1])
    got = backend.batch_get_v1([*names, "absent"], host_pools.indices(pool, [4, 5, 6, 7, 0]))
    assert got == [True, False, True, True, False]
    # F03, F06: what can't be loaded isn't there any more, and can be stored again.
    assert backend.batch_exists(names) == 1
    assert backend.batch_set_v1(names, host_pools.indices(pool, [4, 1, 6, 7])) == [True] * 4
    assert backend.batch_exists(names) == 4
    counters = backend.counters()
    assert (counters["load_ok"], counters["load_corrupt"], counters["load_absent"]) == (3, 1, 1)
    assert (counters["dump_ok"], counters["dump_existing"]) == (5, 3)


def test_a_manifest_says_what_a_directory_holds(attach, tmp_path):
    """Pinned: beside the blocks lies a file that tells a person the model, type and sizes."""
    backend = attach(host_pools.mha_pool())
    path = tmp_path / "store" / backend.identity.directory_name / "identity.json"
    manifest = json.loads(path.read_text())
    assert manifest["model_identity"] == "tests/model"
    assert manifest["dtype"] == "bfloat16"
    assert manifest["tensor_sizes"] == [1536, 1536]
    assert manifest["store"]["block_bytes"] == 8192


def test_clear_spares_other_models(attach, tmp_path):
    """Pinned: clear removes this identity's blocks, from disk too, and no other's."""
    pool = host_pools.mha_pool(fill=7)
    ours, theirs = attach(pool), attach(pool, extra={"model_identity": "tests/other"})
    names = keys(3)
    for backend in (ours, theirs):
        backend.batch_set_v1(names, host_pools.indices(pool, [0, 1, 2]))
    ours.clear()
    assert ours.batch_exists(names) == 0
    assert theirs.batch_exists(names) == 3
    assert len(blocks(tmp_path)) == 3


def host_indices_of(pool, dtype):
    """Page 0's indices, in a type that they never have."""
    return host_pools.indices(pool, [0]).to(dtype)


@pytest.mark.parametrize(
    ("bad", "fallback"),
    [
        (lambda b, p: b.batch_get_v1(keys(2), host_pools.indices(p, [0])), [False, False]),
        (lambda b, p: b.batch_set_v1(keys(2), host_pools.indices(p, [0])), [False, False]),
        (lambda b, p: b.batch_get_v1(keys(1), None), [False]),
        (lambda b, p: b.batch_set_v1(keys(1), host_indices_of(p, torch.float32)), [False]),
        (lambda b, p: b.batch_get_v1(keys(1), host_indices_of(p, torch.uint8)), [False]),
        (lambda b, p: b.batch_set_v1([3], host_pools.indices(p, [0])), [False]),
        (lambda b, p: b.batch_exists([None]), 0),
        (lambda b, p: b.batch_get(keys(1), [torch.empty(3)]), [None]),
        (lambda b, p: b.batch_get(keys(2), [torch.empty(3)]), [None, None]),
        (lambda b, p: b.batch_set(keys(1), [torch.empty(3)]), False),
        (lambda b, p: b.batch_set(keys(1)), False),
        (lambda b, p: b.batch_set(keys(1), [7]), False),
        (lambda b, p: b.set(keys(1)[0]), False),
    ],
)
def test_nothing_raises_once_attached(attach, caplog, bad, fallback):
    """Pinned (decision 2, F26): nonsense gives misses and a log line, never an exception."""
    pool = host_pools.mha_pool(fill=8)
    backend = attach(pool)
    assert bad(backend, pool) == fallback
    assert backend.batch_exists(keys(2)) == 0
    assert backend.batch_set_v1(keys(1), host_pools.indices(pool, [0])) == [True]


def test_detached_means_misses(attach):
    """Pinned: before attach and after close every call answers, with nothing."""
    pool = host_pools.mha_pool()
    backend = attach(pool)
    backend.close()
    backend.close()
    one = host_pools.indices(pool, [0])
    assert backend.batch_exists(keys(1)) == 0
    assert backend.batch_get_v1(keys(1), one) == [False]
    assert backend.batch_set_v1(keys(1), one) == [False]
    assert backend.get(keys(1)[0]) is None
    assert backend.counters() == {}
    backend.clear()
    assert backend.get_stats() is None


def test_destroying_the_pool_closes_the_store_first(attach):
    """Pinned: SGLang destroys its pools before it closes backends on a graceful exit."""
    pool = host_pools.mha_pool(fill=9)
    backend = attach(pool)
    order = []
    store_close = backend._store.close

    def close():
        order.append(pool.kv_buffer is not None)
        return store_close()

    backend._store.close = close
    pool.destroy()
    assert order == [True]
    assert pool.kv_buffer is None
    assert backend.batch_exists(keys(1)) == 0
    assert "destroy" not in vars(pool)


def test_attach_and_detach_leave_nothing(attach):
    """Pinned: threads and descriptors after each detach are as before."""
    pool = host_pools.mha_pool(fill=10)

    attach(pool).close()  # what the first use of a library leaves behind isn't ours
    before = threads_and_descriptors()
    for _ in range(3):
        backend = attach(pool)
        backend.batch_set_v1(keys(4), host_pools.indices(pool, [0, 1, 2, 3]))
        assert threads_and_descriptors() != before
        backend.close()
        assert comes_back_to(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"posix_queue_dept": 3}}, r"posix_queue_dept.*did you mean posix_queue_depth"),
        ({"extra": {"timeout_ms": "8"}}, r"timeout_ms = '8'"),
        ({"extra": {"store_pipeline": "Cache"}}, r"store_pipeline = 'Cache'"),
        ({"extra": {"shard_size": 5}}, r"shard_size = 5.*3072"),
        ({"extra": {"tensor_size_list": [1, 2]}}, r"tensor_size_list = \[1, 2\].*1536"),
        ({"dcp_size": 2, "is_mla": True, "tp_size": 2, "logical_page_size": 32}, r"dcp_size = 2"),
        ({"extra": {"model_identity": None}}, r"model_identity = null"),
        (
            {"extra": {"storage_backends": ["/dev/null/a"]}},
            r"storage_backends = \['/dev/null/a'\]: allowed is.*can make.*Not a directory.*doctor",
        ),
    ],
)
def test_wrong_settings_stop_the_attach(attach, changes, message):
    """Pinned (F32): raised at attach, with key, value and what is allowed."""
    pool = host_pools.mha_pool()
    with pytest.raises(ConfigError, match=message):
        attach(pool, **changes)
    assert "destroy" not in vars(pool)


def test_a_layout_we_cannot_store_stops_the_attach(attach):
    """Pinned: the refusal names SGLang's flag and what it may be."""
    pool = host_pools.mha_pool()
    pool.layout = "page_tail"
    with pytest.raises(ConfigError, match=r"hicache_mem_layout = 'page_tail'.*page_first"):
        attach(pool)


def test_metrics_are_what_the_collector_takes(attach):
    """Pinned: a fresh StorageMetrics of pages and GB/s since the last call; None when off."""
    pool = host_pools.mha_pool(fill=12)
    backend = attach(pool, metrics=True)
    names = keys(3)
    backend.batch_set_v1(names, host_pools.indices(pool, [0, 1, 2]))
    backend.batch_get_v1([*names, "absent"], host_pools.indices(pool, [4, 5, 6, 7]))
    stats = backend.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert stats.backup_bandwidth[0] > 0 and stats.prefetch_bandwidth[0] > 0
    again = backend.get_stats()
    assert again.backup_pgs == [] and again is not stats
    assert attach(host_pools.mha_pool()).get_stats() is None


def test_errors_are_logged_at_a_bounded_rate(attach, tmp_path, caplog):
    """Pinned: a hundred failing batches give a few lines, not hundreds, with the reason."""
    pool = host_pools.mha_pool(fill=13)
    backend = attach(pool)
    base = tmp_path / "store" / backend.identity.directory_name
    (base / "blocks").rmdir()
    (base / "blocks").write_text("in the way")
    with caplog.at_level(logging.WARNING, "cachestore"):
        for i in range(100):
            assert backend.batch_set_v1(keys(1, i), host_pools.indices(pool, [0])) == [False]
    assert 1 <= len(caplog.records) <= 4
    assert "1 IO" in caplog.text and "Not a directory" in caplog.text
    assert backend.counters()["dump_failed"] == 100


def test_all_calls_at_once(attach):
    """Pinned: SGLang's threads use one backend together; every answer is right."""
    pool = host_pools.mha_pool(fill=14, pages=8)
    backend = attach(pool)
    names = keys(4)
    wanted = [host_pools.page_bytes(pool, p) for p in range(4)]
    failures = []
    barrier = threading.Barrier(3)

    def run(step):
        try:
            barrier.wait(10)
            for _ in range(50):
                step()
        except Exception as error:
            failures.append(error)

    def dump():
        assert backend.batch_set_v1(names, host_pools.indices(pool, [0, 1, 2, 3])) == [True] * 4

    def look():
        assert 0 <= backend.batch_exists(names) <= 4

    def load():
        if backend.batch_get_v1(names, host_pools.indices(pool, [4, 5, 6, 7])) == [True] * 4:
            got = [host_pools.page_bytes(pool, p) for p in range(4, 8)]
            assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))

    threads = [threading.Thread(target=run, args=(step,)) for step in (dump, look, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert backend.batch_exists(names) == 4


def test_the_decision_is_one_log_line(attach, caplog):
    """Pinned (contract A7): pipeline and reason, once; for Cache|Posix with the copy settings."""
    with caplog.at_level(logging.INFO, "cachestore"):
        attach(host_pools.mha_pool())
        attach(host_pools.mla_pool(), is_mla=True)
    posix, cache = [r.message for r in caplog.records if "pipeline" in r.message]
    assert "pipeline Posix" in posix and "not MLA" in posix and "h2h" not in posix
    assert "pipeline Cache|Posix" in cache and "the model is MLA" in cache
    assert "cache_h2h_worker_number 4, cache_h2h_queue_depth 1024" in cache


def test_the_counters_are_logged_at_the_end(attach, caplog):
    """Pinned: one line at close with what was counted, by the counters' names."""
    pool = host_pools.mha_pool(fill=15)
    backend = attach(pool)
    backend.batch_set_v1(keys(3), host_pools.indices(pool, [0, 1, 2]))
    with caplog.at_level(logging.INFO, "cachestore"):
        backend.close()
        attach(pool).close()
    first, second = [r.message for r in caplog.records if "closed" in r.message]
    assert "dump_requested 3, dump_ok 3" in first and "load" not in first
    assert second.endswith("counted since attach: nothing")
