"""The file for `cachestore top`: what it has, who may read it, and what may go wrong with it."""

import json
import os
import stat
import subprocess
import threading

import pytest

import host_pools
from backends import keys
from cachestore_connector import stats_reader
from cachestore_connector.page_counts import FIELDS
from cachestore_connector.stats_file import StatsFile
from cachestore_connector.ticker import Ticker
from disks import fill, small_disk
from rig.server import poll


@pytest.fixture
def failures():
    """What files made by ``file`` said went wrong."""
    return []


@pytest.fixture
def file(tmp_path, failures):
    """``file(directory)``: a `StatsFile`, closed after the test."""
    made = []

    def make(directory=tmp_path):
        made.append(StatsFile(str(directory), {"model": "m"}, failures.append))
        return made[-1]

    yield make
    for each in made:
        each.close()


def mine(tmp_path):
    """The directory of this user's files."""
    return tmp_path / f"cachestore-stats-{os.geteuid()}"


def read(tmp_path):
    """The files there, once there is one; those that are renamed meanwhile are read again."""
    return poll(lambda: sorted(mine(tmp_path).glob("*.json")), 20, "a stats file")


def test_what_an_attached_backend_writes(attach, tmp_path):
    """Pinned: every field, exact; readable by the user alone; gone after detach, as its directory.

    ``cachestore top`` reads it (`stats_reader`).
    """
    pool = host_pools.mha_pool(fill=1)
    backend = attach(pool, tp_rank=1, tp_size=4)
    backend.batch_set_v1(keys(3), host_pools.indices(pool, range(3)))
    backend.batch_get_v1(keys(4), host_pools.indices(pool, range(4)))

    def written():
        (path,) = read(tmp_path)
        found = json.loads(path.read_text())
        return found if found["counters"].get("load_absent") == 1 else None

    found = poll(written, 20, "the counters")
    (path,) = read(tmp_path)
    assert path.name == f"{os.getpid()}-0.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    page = backend._pools["kv"].layout.page_bytes
    times = {name: found.pop(name) for name in ("time", "started")}
    assert times["started"] <= times["time"]
    assert found == {
        "version": 1,
        "pid": os.getpid(),
        "pid_start": stats_reader.started_at(os.getpid()),
        "interval": 1.0,
        "model": "served",
        "pipeline": "Posix",
        "directories": [str(tmp_path / "store")],
        "identity": backend.identity.directory_name,
        "ranks": {
            "tp_rank": 1, "tp_size": 4, "pp_rank": 0, "pp_size": 1,
            "attn_cp_rank": 0, "attn_cp_size": 1, "dp_rank": 0,
        },
        "counters": backend.counters() | {"lookup_pages": 0, "lookup_page_hits": 0},
        "pools": {
            "kv": dict.fromkeys(FIELDS, 0)
            | {"dump_ok": 3, "dump_bytes": 3 * page}
            | {"load_ok": 3, "load_absent": 1, "load_bytes": 3 * page}
        },
    }  # fmt: skip
    reading = stats_reader.read(str(tmp_path))
    assert reading.problems == () and len(reading.backends) == 1
    backend.close()
    assert not mine(tmp_path).exists()


def test_it_is_replaced_as_a_whole(file, tmp_path):
    """Pinned: who has the old one open keeps it whole; nothing but the file is left."""
    stats = file()
    stats.write({"counters": {"load_ok": 1}})
    (path,) = read(tmp_path)
    with path.open() as before:
        stats.write({"counters": {"load_ok": 2}})
        assert json.loads(before.read())["counters"] == {"load_ok": 1}
    assert json.loads(path.read_text())["counters"] == {"load_ok": 2}
    assert os.listdir(mine(tmp_path)) == [path.name]


def test_each_backend_has_a_file(file, tmp_path):
    """Pinned: two of one process, or of processes with one number, don't take each other's."""
    one, other = file(), file()
    one.write({"counters": {"load_ok": 1}})
    other.write({"counters": {"load_ok": 2}})
    names = [f"{os.getpid()}-{n}.json" for n in (0, 1)]
    assert sorted(os.listdir(mine(tmp_path))) == names
    one.write({"counters": {"load_ok": 3}})
    assert [json.loads(p.read_text())["counters"]["load_ok"] for p in read(tmp_path)] == [3, 2]
    one.close()
    assert os.listdir(mine(tmp_path)) == names[1:]
    one.write({})
    assert os.listdir(mine(tmp_path)) == names[1:]


def test_what_killed_processes_left_is_removed(file, tmp_path):
    """Pinned: a file that nobody has written for long is; one that was written lately isn't."""
    mine(tmp_path).mkdir(mode=0o700)
    old, new = (mine(tmp_path) / name for name in ("4000000000-0.json", "4000000001-0.json"))
    for path in (old, new):
        path.write_text("{}")
    os.utime(old, (0, 0))
    file().write({})
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("kind", ["missing", "theirs", "link", "file"])
def test_a_directory_that_cannot_be_used(attach, caplog, tmp_path, kind):
    """Pinned: said once, with the reason; nothing is written there, and pages are still moved."""
    where = tmp_path / "shm"
    if kind != "missing":
        where.mkdir()
    if kind == "theirs":
        if os.geteuid() != 0:
            pytest.skip("not root: a directory can't be given away")
        mine(where).mkdir(mode=0o777)
        os.chown(mine(where), 4711, -1)
    elif kind == "link":
        (tmp_path / "target").mkdir()
        mine(where).symlink_to(tmp_path / "target")
    elif kind == "file":
        mine(where).write_text("in the way")
    pool = host_pools.mha_pool(fill=2)
    backend = attach(pool, extra={"cache_buffer_directory": str(where)})
    reports = backend._reports

    def said():
        return [r.message for r in caplog.records if "stats file" in r.message]

    poll(said, 20, "a warning")
    for _ in range(3):
        reports._tell()
    assert backend.batch_set_v1(keys(2), host_pools.indices(pool, range(2))) == [True] * 2
    backend.close()
    assert len(said()) == 1 and str(where) in said()[0] and "cachestore top" in said()[0]
    assert list(tmp_path.rglob("*.json")) == list((tmp_path / "store").rglob("*.json"))


def test_a_full_and_a_read_only_directory(file, failures, tmp_path):
    """Pinned: one complaint a row of failures, no scrap; once there is room it is written again."""
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        stats = file(disk)
        stats.write({"counters": {"load_ok": 1}})
        (path,) = read(disk)
        filler = fill(disk)
        for _ in range(3):
            stats.write({"counters": {"load_ok": 2}})
        assert len(failures) == 1 and "No space left" in failures[0]
        assert os.listdir(mine(disk)) == [path.name]
        filler.unlink()
        stats.write({"counters": {"load_ok": 3}})
        assert json.loads(path.read_text())["counters"] == {"load_ok": 3}
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for _ in range(3):
            stats.write({"counters": {"load_ok": 4}})
        assert len(failures) == 2 and "Read-only" in failures[1]
        stats.close()  # can't remove it, and doesn't raise


def in_child(*steps):
    """Run them in a forked child, which must not raise."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for step in steps:
                step()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_leaves_the_file_alone(file, tmp_path):
    """Pinned: a child that has it by a fork writes nothing to it, and doesn't remove it."""
    stats = file()
    stats.write({"counters": {"load_ok": 1}})
    in_child(lambda: stats.write({"counters": {"load_ok": 2}}))
    in_child(stats.close)
    (path,) = read(tmp_path)
    assert json.loads(path.read_text())["counters"] == {"load_ok": 1}


def test_a_forked_child_tells_nothing(attach, tmp_path):
    """Pinned: a child that uses and closes what it inherited neither hangs nor counts."""
    pool = host_pools.mha_pool(fill=3)
    backend = attach(pool, metrics=True)
    (path,) = read(tmp_path)
    indices = host_pools.indices(pool, range(2))
    in_child(
        lambda: backend.batch_get_v1(keys(2), indices),
        lambda: backend.batch_exists(keys(2)),
        backend._reports._tell,
        backend.close,
    )
    assert read(tmp_path) == [path]
    assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not any(backend._reports.counts.pools()["kv"].values())


def test_a_thread_that_hangs_does_not_hold_up_a_detach(file, failures, tmp_path):
    """Pinned: stopping waits for a while at most; what is written after closing is removed."""
    other, stats = file(), file()
    other.write({})
    (path,) = read(tmp_path)
    inside, go = threading.Event(), threading.Event()
    replace = stats._replace

    def hanging(*args):
        inside.set()
        go.wait(30)
        replace(*args)

    stats._replace = hanging
    ticker = Ticker(lambda: stats.write({}), 30, "test")
    try:
        assert inside.wait(30)
        assert not ticker.stop(0.01)
        stats.close()
    finally:
        go.set()
    assert ticker.stop(30)
    assert os.listdir(mine(tmp_path)) == [path.name] and failures == []


def test_no_tick_after_stop():
    """Pinned: the first comes at once; once `stop` has said so, there is no other."""
    ticks = threading.Semaphore(0)
    ticker = Ticker(ticks.release, 0.001, "ticks")
    for _ in range(3):
        assert ticks.acquire(timeout=30)
    assert ticker.stop(30)
    while ticks.acquire(blocking=False):
        pass
    assert not any(t.name == "ticks" for t in threading.enumerate())
