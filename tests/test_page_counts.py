"""What is counted of SGLang's batches, by pool and result."""

import json
import threading
import time

import numpy as np
import pytest

import host_pools
from backends import blocks, counters_become, keys
from cachestore_connector.errors import Code, StoreClosed
from cachestore_connector.page_counts import DUMP, FIELDS, LOAD, RESULTS, PageCounts, results_of
from cachestore_connector.store import Store


def counted(backend, pool="kv"):
    """The counts that aren't zero, of a pool of a backend that is attached."""
    return {name: n for name, n in backend._reports.counts.pools()[pool].items() if n}


@pytest.mark.parametrize("move", [LOAD, DUMP])
@pytest.mark.parametrize("code", list(Code))
def test_every_code_is_one_result(move, code):
    """Pinned: each status ends as one of the results, and only OK as ok; new ones too."""
    (result,) = results_of(move, [int(code)] * 3)
    assert result in RESULTS[move]
    assert (result == "ok") == (code == Code.OK)
    assert results_of(move, [0, int(code), 4711])["failed"] >= 1


def test_absent_and_damaged_are_told_apart(attach, tmp_path):
    """Pinned (F34): loaded, absent, and present but failed are three counts; a dump's two more."""
    pool = host_pools.mha_pool(fill=1)
    backend = attach(pool)
    names = keys(4)
    page = backend._pools["kv"].layout.page_bytes
    assert backend.batch_set_v1(names, host_pools.indices(pool, range(4))) == [True] * 4
    assert counted(backend) == {"dump_ok": 4, "dump_bytes": 4 * page}
    damaged, gone = blocks(tmp_path)[:2]
    with open(damaged, "r+b") as file:
        file.write(b"\xff" * 64)
    gone.unlink()
    asked = [*names, "never stored"]
    done = backend.batch_get_v1(asked, host_pools.indices(pool, range(5)))
    assert sum(done) == 2
    wanted = {"load_ok": 2, "load_absent": 2, "load_failed": 1, "load_bytes": 2 * page}
    assert counted(backend) == {"dump_ok": 4, "dump_bytes": 4 * page} | wanted
    counters_become([backend], load_ok=2, load_absent=2, load_corrupt=1)


def test_refused_and_late_ones(attach, monkeypatch):
    """Pinned: refused, timed out, and failed by an exception are counted; a closed store, refused.

    What the store answers is made up here; that it does is the native tests' to show.
    """
    pool = host_pools.mha_pool(fill=2)
    backend = attach(pool)

    def answering(answer):
        def load(*_):
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(Store, "load", load)
        return backend.batch_get_v1(keys(3), host_pools.indices(pool, range(3)))

    assert answering([Code.REFUSED] * 3) == [False] * 3
    assert answering([Code.OK, Code.TIMEOUT, Code.NOT_FOUND]) == [True, False, False]
    assert answering(ValueError("a bug")) == [False] * 3
    assert answering(StoreClosed("closed")) == [False] * 3
    counts = counted(backend)
    del counts["load_bytes"]
    assert counts == {
        "load_ok": 1, "load_absent": 1, "load_timeout": 1, "load_refused": 6, "load_failed": 3,
    }  # fmt: skip


def test_pools_have_counts_of_their_own(attach):
    """Pinned: what belongs to a page is counted for its own pool, and a pool unused with zeroes."""
    from pool_stacks import Rank

    rank = Rank(attach, "swa", fill=3)
    assert rank.backend._reports.counts.pools() == {
        name: dict.fromkeys(FIELDS, 0) for name in ("kv", "swa")
    }
    assert all(all(done) for done in rank.store(keys(6), list(range(6))))
    pools = rank.backend._reports.counts.pools()
    assert pools["kv"]["dump_ok"] == 6
    assert 0 < pools["swa"]["dump_ok"] <= 6
    page = rank.backend._pools["swa"].layout.page_bytes
    assert pools["swa"]["dump_bytes"] == pools["swa"]["dump_ok"] * page
    json.dumps(pools)


def test_threads_lose_no_count():
    """Pinned: batches counted by many threads at once add up."""
    counts = PageCounts()
    barrier = threading.Barrier(8)

    def add():
        barrier.wait(10)
        for _ in range(500):
            counts.add("kv", LOAD, [0, 0, 1], 10)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    fields = counts.pools()["kv"]
    assert (fields["load_ok"], fields["load_absent"], fields["load_bytes"]) == (8000, 4000, 80000)


def test_counting_is_cheap():
    """Pinned: a full batch takes some microseconds to count; the best of several tries."""
    counts, codes = PageCounts(), np.zeros(128, dtype=int).tolist()
    took = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            counts.add("kv", LOAD, codes, 4096)
        took.append((time.perf_counter() - began) / 50)
    assert min(took) < 20e-6
