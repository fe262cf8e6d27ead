"""The native handle: batches, errors, lifetime."""

import gc
import glob
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from backends import flip
from cachestore_connector.errors import (
    Code,
    StoreClosed,
    StoreInvalidArgument,
    StoreIOError,
)
from cachestore_connector.store import PoolOptions, Store, crc32c
from pages_of_bytes import Memory, block_ids
from process_state import comes_back_to, threads_and_descriptors


@pytest.fixture
def store(options):
    with_closing = Store(options())
    yield with_closing
    with_closing.close()


@pytest.fixture
def cache(tmp_path):
    """Options of a Cache tier whose buffer lies in the test's directory."""
    return {
        "pipeline": "Cache|Posix",
        "shard_size": 4096,
        "block_size": 4096,
        "cache_buffer_directory": str(tmp_path),
        "cache_buffer_capacity": 1 << 20,
    }


def test_what_was_dumped_is_loaded(store):
    """Pinned: bytes and order, for more blocks than the queue is deep (300 over 128)."""
    source, target = Memory(300, [100, 37], seed=1), Memory(300, [100, 37])
    ids = block_ids(300)
    assert store.lookup_prefix(ids) == 0
    assert store.dump(ids, source.addresses(), source.lengths()) == [Code.OK] * 300
    assert store.lookup_prefix(ids) == 300
    assert store.load(ids, target.addresses(), target.lengths()) == [Code.OK] * 300
    assert np.array_equal(source.bytes, target.bytes)


def test_results_come_per_block_in_order(store):
    """Pinned: an absent block between present ones is a miss of its own, not its neighbours'."""
    memory = Memory(3, [100, 37], seed=2)
    ids = block_ids(3)
    first_and_last = ids[:16] + ids[32:]
    some = Memory(2, [100, 37], seed=3)
    assert store.dump(first_and_last, some.addresses(), some.lengths()) == [Code.OK] * 2
    codes = store.load(ids, memory.addresses(), memory.lengths())
    assert codes == [Code.OK, Code.NOT_FOUND, Code.OK]
    assert store.lookup(ids) == [True, False, True]
    assert store.lookup_prefix(ids) == 1
    assert np.array_equal(memory.bytes[[0, 2]], some.bytes)


def test_a_second_dump_writes_nothing(store, options):
    """Pinned: a dump of stored blocks costs a lookup: OK, counted as existing, file untouched."""
    memory, ids = Memory(4, [100, 37], seed=4), block_ids(4)
    store.dump(ids, memory.addresses(), memory.lengths())
    root = Path(options().storage_backends[0])
    before = {path: path.stat().st_ino for path in root.rglob("blocks/*/*")}
    assert len(before) == 4
    assert store.dump(ids, memory.addresses(), memory.lengths()) == [Code.OK] * 4
    assert {path: path.stat().st_ino for path in root.rglob("blocks/*/*")} == before
    stats = store.stats()
    assert (stats["dump_ok"], stats["dump_existing"]) == (4, 4)


def test_damage_is_a_counted_miss_and_heals(store, options):
    """Pinned (F03, F04): a flipped byte is CORRUPT, then absent, and can be stored anew."""
    memory, ids = Memory(1, [100, 37], seed=5), block_ids(1)
    store.dump(ids, memory.addresses(), memory.lengths())
    (path,) = Path(options().storage_backends[0]).rglob("blocks/*/*")
    flip(path)
    target = Memory(1, [100, 37])
    assert store.load(ids, target.addresses(), target.lengths()) == [Code.CORRUPT]
    assert store.lookup(ids) == [False]
    assert store.stats()["load_corrupt"] == 1
    assert any("checksum" in event.text for event in store.events())
    assert store.dump(ids, memory.addresses(), memory.lengths()) == [Code.OK]
    assert store.load(ids, target.addresses(), target.lengths()) == [Code.OK]
    assert np.array_equal(memory.bytes, target.bytes)


def test_numbers_that_do_not_fit_are_refused(store):
    """Pinned: counts, sizes and nulls are checked before anything is read or written."""
    memory, ids = Memory(2, [100, 37], seed=6), block_ids(2)
    with pytest.raises(ValueError, match="need 4 addresses"):
        store.dump(ids, memory.addresses()[:1], memory.lengths())
    with pytest.raises(ValueError, match="multiple of 16"):
        store.lookup(ids[:-1])
    wrong = memory.lengths()
    wrong[1, 1] = 38
    with pytest.raises(StoreInvalidArgument, match=r"sizes\[3\] is 38"):
        store.dump(ids, memory.addresses(), wrong)
    nowhere = memory.addresses()
    nowhere[1, 0] = 0
    with pytest.raises(StoreInvalidArgument, match=r"addresses\[2\] is null"):
        store.load(ids, nowhere, memory.lengths())
    assert store.lookup(ids) == [False, False]


def test_nothing_is_a_request_too(store):
    """Pinned: zero blocks succeed everywhere."""
    empty = np.zeros((0, 2), dtype=np.uint64)
    assert store.lookup(b"") == []
    assert store.lookup_prefix(b"") == 0
    assert store.load(b"", empty, empty) == []
    assert store.dump(b"", empty, empty) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": "Disk"}, "pipeline is Disk"),
        ({"storage_backends": []}, "storage_backends is empty"),
        ({"storage_backends": ["relative"]}, "storage_backends is relative"),
        ({"identity_name": "a/b"}, "identity_name is a/b"),
        ({"shard_size": 136}, "shard_size is 136"),
        ({"block_size": 200}, "block_size is 200"),
        ({"tensor_sizes": [1] * 400, "shard_size": 400, "block_size": 400}, "tensor_count 400"),
        ({"posix_load_worker_number": 0}, "posix_load_worker_number is 0"),
        ({"posix_queue_depth": 0}, "posix_queue_depth is 0"),
        ({"timeout_ms": 0}, "timeout_ms is 0"),
    ],
)
def test_native_checks_every_field(options, changes, message):
    """Pinned: the native side takes nothing on trust, and its error names field and value."""
    with pytest.raises(StoreInvalidArgument, match=message):
        Store(options(**changes))


def test_a_directory_that_cannot_be_made_is_named(options, tmp_path):
    """Pinned: opening fails with the path and the system's reason."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((StoreIOError, LookupError), match=r"file.*Not a directory"):
        Store(options(storage_backends=[str(tmp_path / "file" / "below")]))


def test_paths_of_every_kind(options, tmp_path):
    """Pinned (F32): spaces, colons, unicode and undecodable bytes in a directory name."""
    names = ["with space", "a:b", "ünï-码", "line\nbreak", os.fsdecode(b"\xff\xfe")]
    for name in names:
        root = tmp_path / name
        store = Store(options(storage_backends=[str(root)]))
        memory, ids = Memory(1, [100, 37], seed=7), block_ids(1)
        assert store.dump(ids, memory.addresses(), memory.lengths()) == [Code.OK]
        store.close()
        assert len(list(root.rglob("blocks/*/*"))) == 1


def test_another_store_finds_them(options):
    """Pinned: what one process stored, the next one loads; another identity's doesn't match."""
    memory, ids = Memory(2, [100, 37], seed=8), block_ids(2)
    first = Store(options())
    first.dump(ids, memory.addresses(), memory.lengths())
    first.close()
    second = Store(options())
    target = Memory(2, [100, 37])
    assert second.load(ids, target.addresses(), target.lengths()) == [Code.OK] * 2
    assert np.array_equal(memory.bytes, target.bytes)
    second.close()
    # The same directory name, by accident or by hand, with another fingerprint.
    stranger = Store(options(identity_fingerprint=bytes(32)))
    assert stranger.load(ids, target.addresses(), target.lengths()) == [Code.CORRUPT] * 2
    stranger.close()


def test_clear_is_of_one_identity(options):
    """Pinned: clear forgets this store's blocks and leaves another identity's alone."""
    ours, theirs = Store(options()), Store(options(identity_name="other-model"))
    memory, ids = Memory(2, [100, 37], seed=9), block_ids(2)
    for each in (ours, theirs):
        each.dump(ids, memory.addresses(), memory.lengths())
    ours.clear()
    assert ours.lookup(ids) == [False, False]
    assert theirs.lookup(ids) == [True, True]
    assert ours.dump(ids, memory.addresses(), memory.lengths()) == [Code.OK] * 2
    ours.close()
    theirs.close()


def test_close_is_final_and_repeatable(options):
    """Pinned: after close every call says so; a second close does nothing."""
    store = Store(options())
    store.close()
    store.close()
    assert store.closed
    for call in (lambda: store.lookup(b""), store.stats, store.events, store.clear):
        with pytest.raises(StoreClosed):
            call()


def test_close_gives_the_last_counters_and_events(options):
    """Pinned: what a close itself still does, and what it couldn't, is told; once."""
    store = Store(options())
    memory, ids = Memory(2, [100, 37], seed=14), block_ids(2)
    store.dump(ids, memory.addresses(), memory.lengths())
    counters, events = store.close()
    assert (counters["dump_ok"], events) == (2, [])
    assert store.close() == ({}, [])


def test_a_close_stores_what_is_only_in_the_cache(options, cache):
    """Pinned: counted when the close returns; what can't be stored in time is reported."""
    store = Store(options(**cache))
    memory, ids = Memory(50, [100, 37], seed=15), block_ids(50)
    assert store.dump(ids, memory.addresses(), memory.lengths()) == [Code.OK] * 50
    counters, _ = store.close()
    assert counters["cache_stored"] == counters["storage_dumps"] == 50

    store = Store(options(**cache, timeout_ms=300))
    (identity,) = Path(options().storage_backends[0]).iterdir()
    (identity / "blocks").rename(identity / "aside")
    (identity / "blocks").write_text("in the way")
    more = block_ids(50, "more")
    assert store.dump(more, memory.addresses(), memory.lengths()) == [Code.OK] * 50
    counters, events = store.close()
    assert counters["cache_given_up"] == 50
    assert any("only in the cache: 50 blocks" in event.text for event in events)


def test_a_parent_is_an_id(store):
    """Pinned: the block before the first one: 16 bytes, or none."""
    memory, ids = Memory(2, [100, 37], seed=16), block_ids(2)
    parent = block_ids(1, "parent")
    assert store.dump(ids, memory.addresses(), memory.lengths(), parent) == [Code.OK] * 2
    assert store.load(ids, memory.addresses(), memory.lengths(), parent) == [Code.OK] * 2
    with pytest.raises(ValueError, match="parent_id has 15 bytes"):
        store.load(ids, memory.addresses(), memory.lengths(), parent[:-1])


def test_another_pool_waits_for_room(options):
    """Pinned: what belongs to pages isn't refused because their own requests fill the queue."""
    store = Store(options(posix_queue_depth=8))
    side = store.open_pool(
        PoolOptions(
            identity_name="model-side",
            identity_manifest="{}",
            identity_fingerprint=bytes(32),
            tensor_sizes=(9000,),
            shard_size=9000,
            block_size=9000,
        )
    )
    stop = threading.Event()

    def fill_the_queue():
        memory, number = Memory(8, [100, 37], seed=17), 0
        while not stop.is_set():
            number += 1
            store.dump(block_ids(8, str(number)), memory.addresses(), memory.lengths())

    busy = threading.Thread(target=fill_the_queue)
    busy.start()
    try:
        memory, ids = Memory(40, [9000], seed=18), block_ids(40)
        for _ in range(3):
            codes = store.dump(ids, memory.addresses(), memory.lengths(), pool=side)
            assert codes == [Code.OK] * 40
        assert store.lookup(ids, side) == [True] * 40
        assert store.stats()["dump_refused"] > 0  # and tried again
    finally:
        stop.set()
        busy.join()
        store.close()


def test_close_beside_busy_threads(options):
    """Pinned: threads in the middle of batches get results or StoreClosed; none hangs."""
    store = Store(options())
    memory, ids = Memory(100, [100, 37], seed=10), block_ids(100)
    started, ended = threading.Barrier(5), []

    def busy():
        target = Memory(100, [100, 37])
        started.wait(10)
        try:
            while True:
                store.dump(ids, memory.addresses(), memory.lengths())
                codes = store.load(ids, target.addresses(), target.lengths())
                if Code.CLOSED in codes:
                    break
        except StoreClosed:
            pass
        ended.append(True)

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait(10)
    store.close()
    for thread in threads:
        thread.join(20)
    assert ended == [True] * 4


def test_another_user_has_a_buffer_of_his_own(options, cache):
    """Pinned: two users with one identity: neither's buffer keeps the other from starting."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    with tempfile.TemporaryDirectory() as place:  # as /dev/shm is
        os.chmod(place, 0o1777)
        changes = cache | {"cache_buffer_directory": place, "storage_backends": [place + "/1"]}
        mine = Store(options(**changes))
        theirs = options(**changes | {"storage_backends": [place + "/2"]})
        script = f"""
import os
from cachestore_connector.store import Store, StoreOptions
os.setgroups([])
os.setegid(65534)
os.seteuid(65534)
Store({theirs!r}).close()
"""
        run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert len(glob.glob(place + "/cachestore-region-*")) == 1
        mine.close()


def test_a_forked_child_has_no_part_in_it(options, cache):
    """Pinned: no call of a child waits for the parent's threads, inside calls when it was made."""
    store = Store(options(**cache))
    ids, ended = block_ids(64), threading.Event()

    def busy(number):
        memory = Memory(64, [100, 37], seed=number)
        while not ended.is_set():
            store.dump(ids, memory.addresses(), memory.lengths())

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends it if it hangs
                refused = False
                try:
                    store.lookup(ids)
                except StoreClosed:
                    refused = store.close() == ({}, []) and store.closed
                os._exit(0 if refused else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert store.lookup(ids) == [True] * 64
    store.close()


def test_open_and_close_leave_nothing(options):
    """Pinned (F09): threads, file descriptors and temporary files are back where they were."""
    memory, ids = Memory(8, [100, 37], seed=11), block_ids(8)
    gc.collect()
    before = threads_and_descriptors()
    for _ in range(20):
        store = Store(options())
        store.dump(ids, memory.addresses(), memory.lengths())
        store.close()
        assert comes_back_to(before)
    root = Path(options().storage_backends[0])
    assert list(root.glob("*/tmp/*")) == []


def test_a_read_only_store_still_serves(options):
    """Pinned: a directory that can't be written at start-up is said, and what it holds is served.

    Root ignores mode bits, so the write is made impossible by a file where tmp/ should be.
    """
    memory, ids = Memory(1, [100, 37], seed=12), block_ids(1)
    store = Store(options())
    store.dump(ids, memory.addresses(), memory.lengths())
    store.close()
    (identity,) = Path(options().storage_backends[0]).iterdir()
    (identity / "tmp").rmdir()
    (identity / "tmp").write_text("in the way")
    store = Store(options())
    assert any("nothing can be stored" in event.text for event in store.events())
    target = Memory(1, [100, 37])
    assert store.load(ids, target.addresses(), target.lengths()) == [Code.OK]
    more = block_ids(1, "more")
    assert store.dump(more, memory.addresses(), memory.lengths()) == [Code.IO]
    assert store.lookup(more) == [False]
    store.close()


def test_crc32c_is_the_published_one():
    """Pinned: the format's checksum against RFC 3720's vector and an independent implementation."""
    import crc32c as reference

    assert crc32c(b"123456789") == 0xE3069283
    data = np.random.default_rng(13).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    for length in (0, 1, 7, 8, 63, 64, 255, 1024, 4096, 5000):
        assert crc32c(data[:length]) == reference.crc32c(data[:length])
    assert crc32c(data[100:], crc32c(data[:100])) == reference.crc32c(data)
