"""Prometheus metrics of a backend: exact, from attach to attach, beside SGLang's own."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
from prometheus_client import REGISTRY, Counter
from prometheus_client.parser import text_string_to_metric_families

import host_pools
from backends import blocks, keys
from cachestore_connector import metrics_table as table
from cachestore_connector.metrics import Metrics
from cachestore_connector.store import GAUGES, Store
from rig.server import poll

HITS = "cachestore_hit_blocks_total"


def samples():
    """Our samples in this process's registry: (name, labels) to value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if family.name.startswith("cachestore_")
    }


class Seen:
    """What became of one model's metrics since this was made."""

    def __init__(self, model="served"):
        self._model = model
        self._before = samples()

    def __call__(self, name, **labels):
        """By how much the samples of a name that have these labels grew, together."""
        wanted = (labels | {"model_name": self._model}).items()
        return sum(
            value - self._before.get((found, given), 0)
            for (found, given), value in samples().items()
            if found == name and set(wanted) <= given
        )

    def pages(self, move, pool="kv"):
        """Pages by result, but for zeroes."""
        results = ("ok", "absent", "failed", "refused", "timeout")
        name = f"cachestore_{move}_pages_total"
        counts = {result: self(name, pool=pool, result=result) for result in results}
        return {result: count for result, count in counts.items() if count}

    def now(self, name, **labels):
        """The sum of what the samples say now."""
        wanted = set((labels | {"model_name": self._model}).items())
        return sum(v for (n, given), v in samples().items() if n == name and wanted <= given)


def test_a_scripted_run_gives_exact_numbers(attach, tmp_path):
    """Pinned (F34): every number is what the script did; attached again, it goes on from there."""
    pool = host_pools.mha_pool(fill=1)
    names = keys(4)
    for attached in (1, 2):
        seen = Seen()
        backend = attach(pool, metrics=True)
        page = backend._pools["kv"].layout.page_bytes
        assert seen.now("cachestore_attached") == 1

        assert backend.batch_set_v1(names, host_pools.indices(pool, range(4))) == [True] * 4
        assert backend.batch_set_v1(names[:1], host_pools.indices(pool, [0])) == [True]
        assert backend.batch_exists([*names, "absent", "absent too"]) == 4
        damaged, gone = blocks(tmp_path)[:2]
        with open(damaged, "r+b") as file:
            file.write(bytes([attached]) * 64)  # what is loaded of it is dumped the next time
        gone.unlink()
        assert sum(backend.batch_get_v1(names, host_pools.indices(pool, range(4)))) == 2

        # What SGLang was answered is counted when it is.
        assert seen.pages("load") == {"ok": 2, "absent": 1, "failed": 1}
        assert seen.pages("dump") == {"ok": 5}
        assert seen("cachestore_load_bytes_total") == 2 * page
        assert seen("cachestore_dump_bytes_total") == 5 * page
        assert seen("cachestore_lookup_pages_total", result="hit") == 4
        assert seen("cachestore_lookup_pages_total", result="miss") == 2
        assert seen("cachestore_lookup_seconds_count") == 1
        assert seen("cachestore_load_seconds_count", pool="kv") == 1
        assert seen("cachestore_dump_seconds_count", pool="kv") == 2

        # What the store counts, about every second, and to the last one at the end.
        poll(lambda seen=seen: seen(HITS, tier="storage") == 2, 20, "blocks from the storage")
        assert seen.now("cachestore_directories", state="in_use") == 1
        backend.close()
        backend.close()
        assert (seen(HITS, tier="storage"), seen(HITS, tier="cache")) == (2, 0)
        assert seen("cachestore_checksum_failures_total") == 1
        assert seen("cachestore_load_errors_total") == 0
        written = 4 if attached == 1 else 2  # the other two are still there
        assert seen("cachestore_dump_blocks_total", result="written") == written
        assert seen("cachestore_dump_blocks_total", result="existing") == 5 - written
        for gauge in (m.name for m in table.TABLE if m.kind == table.GAUGE):
            assert seen.now(gauge) == 0
    assert sum(backend.batch_get_v1(names, host_pools.indices(pool, range(4)))) == 0
    assert seen.pages("load") == {"ok": 2, "absent": 1, "failed": 1}


def test_hits_are_told_by_tier(attach, tmp_path):
    """Pinned: a page out of the shared buffer is the cache's, one out of a file the storage's."""
    pool, other = host_pools.mla_pool(fill=2), host_pools.mla_pool()
    for tier in ("cache", "storage"):
        seen = Seen()
        backend = attach(pool, metrics=True, is_mla=True)
        if tier == "cache":
            backend.batch_set_v1(keys(3), host_pools.indices(pool, range(3)))
        done = backend.batch_get_v1(keys(3), host_pools.indices(other, range(3)))
        assert done == [True] * 3
        backend.close()
        counts = {t: seen(HITS, tier=t) for t in ("cache", "storage")}
        assert counts == {"cache": 0, "storage": 0} | {tier: 3}
        assert seen("cachestore_write_behind_blocks_total", result="stored") == (
            3 if tier == "cache" else 0
        )


def test_slots_and_capacity_are_shown(attach, tmp_path):
    """Pinned: slots by state add up to the buffer's; used and allowed bytes are the collector's."""
    seen = Seen()
    pool = host_pools.mla_pool(fill=3)
    backend = attach(pool, metrics=True, is_mla=True, extra={"posix_capacity_gb": 1})
    backend.batch_set_v1(keys(3), host_pools.indices(pool, range(3)))
    poll(lambda: seen.now("cachestore_cache_slots", state="clean") == 3, 20, "pages in the cache")
    assert seen.now("cachestore_cache_slots") == backend.counters()["cache_slots"]
    assert seen.now("cachestore_capacity_bytes") == 2**30
    poll(lambda: seen.now("cachestore_used_bytes") > 0, 20, "bytes in files")


def test_ranks_models_and_pools_are_told_apart(attach):
    """Pinned: two ranks in one process count for themselves, as do a page's pools."""
    from pool_stacks import Rank

    seen, pool = Seen(), host_pools.mha_pool(fill=4)
    for rank in (0, 1):
        backend = attach(pool, metrics=True, tp_rank=rank, tp_size=2)
        backend.batch_set_v1(keys(rank + 1), host_pools.indices(pool, range(rank + 1)))
    for rank in (0, 1):
        ok = seen("cachestore_dump_pages_total", tp_rank=str(rank), result="ok")
        assert ok == rank + 1
    seen = Seen()
    rank = Rank(attach, "swa", fill=5, metrics=True)
    assert all(all(done) for done in rank.store(keys(6), list(range(6))))
    window = rank.sides[0].window
    assert (seen.pages("dump"), seen.pages("dump", "swa")) == ({"ok": 6}, {"ok": window})


def test_off_with_sglangs(attach):
    """Pinned: without SGLang's metrics there are none of ours."""
    pool, before = host_pools.mha_pool(fill=6), samples()
    backend = attach(pool, model_name="quiet")
    backend.batch_set_v1(keys(1), host_pools.indices(pool, [0]))
    backend.close()
    assert samples() == before


def test_a_call_that_is_late_is_counted(attach, monkeypatch):
    """Pinned: pages whose result comes when the backend is closed already are in the numbers."""
    seen, pool = Seen(), host_pools.mha_pool(fill=7)
    backend = attach(pool, metrics=True)
    inside, go = threading.Event(), threading.Event()

    def load(*_):
        inside.set()
        go.wait(30)
        return [0, 0]

    monkeypatch.setattr(Store, "load", load)
    indices = host_pools.indices(pool, range(2))
    thread = threading.Thread(target=backend.batch_get_v1, args=(keys(2), indices))
    thread.start()
    assert inside.wait(30)
    backend.close()
    go.set()
    thread.join(30)
    assert seen.pages("load") == {"ok": 2}


def test_metrics_that_fail_are_no_failed_pages(attach, caplog, monkeypatch):
    """Pinned: said once; lookups, loads and dumps go on."""
    from cachestore_connector import metrics

    class Broken:
        def __getitem__(self, name):
            raise OSError("No space left on device")

    monkeypatch.setattr(metrics, "_registered", Broken)
    pool = host_pools.mha_pool(fill=8)
    backend = attach(pool, metrics=True)
    assert backend.batch_set_v1(keys(2), host_pools.indices(pool, range(2))) == [True] * 2
    assert backend.batch_exists(keys(2)) == 2
    assert backend.batch_get_v1(keys(2), host_pools.indices(pool, range(2))) == [True] * 2
    backend.close()
    said = [r.message for r in caplog.records if "metrics" in r.message]
    assert len(said) == 1 and "No space left" in said[0]


@pytest.mark.parametrize("metric", table.TABLE, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric):
    """Pinned: prefix, suffix by kind, base units, a sentence; labels that Prometheus takes."""
    assert metric.name.startswith("cachestore_")
    assert metric.name.endswith("_total") == (metric.kind == table.COUNTER)
    assert metric.name.endswith("_seconds") == (metric.kind == table.HISTOGRAM)
    assert metric.text.endswith(".") and not set(metric.labels) & set(table.COMMON_LABELS)
    assert bool(metric.buckets) == (metric.kind == table.HISTOGRAM)
    assert ("" in metric.read) != bool(metric.labels) or not metric.read
    Counter(metric.name, metric.text, (*table.COMMON_LABELS, *metric.labels), registry=None)


def test_metrics_read_counters_that_there_are(attach):
    """Pinned: each native counter that is read exists, what is a gauge by c_api.h is one here."""
    read = {table.COUNTER: set(), table.GAUGE: set()}

    class Stats(dict):
        def get(self, name, default=None):
            self["names"].add(name)
            return 0

    for kind, names in read.items():
        list(table.values(kind, Stats(names=names)))
    native = set(attach(host_pools.mha_pool()).counters())
    assert read[table.COUNTER] <= (native | {"staged_pages"}) - GAUGES
    assert read[table.GAUGE] <= native & GAUGES
    # What isn't shown: counted by page above, or of use to nobody but the one who looks for a bug.
    assert native - set.union(*read.values()) == {
        "lookup_blocks", "lookup_hits", "load_requested", "load_absent", "load_timeout",
        "load_refused", "load_bytes", "dump_requested", "dump_bytes", "dropped_events",
        "cache_loaded", "cache_direct", "cache_dumped", "cache_dumped_direct",
        "cache_load_running", "cache_dump_running", "storage_loads", "storage_dumps",
        "posix_uses_dropped", "posix_uses_pending",
    }  # fmt: skip


def test_counters_that_jitter_are_not_counted_twice():
    """Pinned: a counter that is seen lower for a moment (one less another is) adds nothing then."""
    seen, said = Seen("jitter"), []
    common = dict.fromkeys(table.COMMON_LABELS, 0) | {"model_name": "jitter"}
    metrics = Metrics(common, said.append)
    for value in (5, 3, 5, 6):
        metrics.follow({"load_ok": value})
    metrics.finish({"load_ok": 6})
    metrics.follow({"load_ok": 9})  # by a thread that was late
    assert seen(HITS, tier="storage") == 6
    assert said == []


def test_sglangs_page_has_them(tmp_path):
    """Pinned: in prometheus_client's multiprocess mode, which SGLang's page is made in.

    A rank that is attached a second time goes on counting, and two processes' counts add up; a
    forked child adds nothing.
    """
    code = textwrap.dedent("""
        import os, sys
        from cachestore_connector import metrics_table as table
        from cachestore_connector.metrics import Metrics
        common = dict.fromkeys(table.COMMON_LABELS, 0) | {"model_name": "m"}
        for _ in range(2):
            metrics = Metrics(common, print)
            metrics.add_pool("kv")
            metrics.add_pages("kv", "load", {"ok": 3, "absent": 1}, 30, 0.01)
            metrics.follow({"evicted_blocks": 2, "posix_used_bytes": 7})
            child = os.fork()
            if child == 0:
                metrics.add_pages("kv", "load", {"ok": 100}, 100, 0.01)
                metrics.finish({"evicted_blocks": 100})
                os._exit(0)
            os.waitpid(child, 0)
            metrics.finish({"evicted_blocks": 4})
        metrics = Metrics(common, print)
        metrics.follow({"posix_used_bytes": 8})
    """)
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    page = subprocess.run(
        [
            sys.executable, "-P", "-c",
            "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
            "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
            "print(generate_latest(registry).decode())",
        ],
        env=env, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = {
        (sample.name, *(sample.labels.get(label, "") for label in ("pool", "result"))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels["model_name"] == "m" and sample.labels["tp_rank"] == "0"
    }
    assert found["cachestore_load_pages_total", "kv", "ok"] == 12
    assert found["cachestore_load_pages_total", "kv", "absent"] == 4
    assert found["cachestore_load_pages_total", "kv", "failed"] == 0
    assert found["cachestore_load_bytes_total", "kv", ""] == 120
    assert found["cachestore_load_seconds_count", "kv", ""] == 4
    assert found["cachestore_evicted_blocks_total", "", ""] == 16
    assert found["cachestore_used_bytes", "", ""] == 8
    assert found["cachestore_attached", "", ""] == 1
