"""Eviction at scale: a million files, and a working set that doesn't fit."""

import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from cachestore_connector.errors import Code
from cachestore_connector.store import Store
from pages_of_bytes import Memory

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

FILE = 8192  # of a block of the options' tensors


@pytest.fixture
def memory_directory():
    """A directory in memory with room for the files, gone after the test."""
    needed = 6 << 30
    if shutil.disk_usage("/dev/shm").free < needed:
        pytest.skip(f"less than {needed} bytes free in /dev/shm")
    path = tempfile.mkdtemp(dir="/dev/shm", prefix="cachestore-soak-")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


def _wait(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def _resident_kib():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def _lookup_us(cases, rounds=31):
    """Microseconds a key, of lookups of 1,000 keys, by turns: the median of each (store, ids).

    The files have no records, so that none counts as a block: each is looked at all the same.
    """
    times = [[] for _ in cases]
    for _ in range(rounds):
        for (store, ids), taken in zip(cases, times, strict=True):
            begin = time.perf_counter()
            found = store.lookup(ids)
            taken.append((time.perf_counter() - begin) / len(found) * 1e6)
    return [statistics.median(taken) for taken in times]


def _make_files(root, first, count):
    """Files of 1 to 4096 bytes with names of blocks; the n-th was used at second n."""
    blocks = root / "model-0123456789abcdef" / "blocks"
    ids = []
    made = set()
    for n in range(first, first + count):
        block = hashlib.blake2b(str(n).encode(), digest_size=16).digest()
        name = block.hex()
        directory = f"{blocks}/{name[:3]}"
        if directory not in made:
            os.makedirs(directory, exist_ok=True)
            made.add(directory)
        path = f"{directory}/{name}"
        with open(path, "wb") as file:
            file.write(b"x" * (n % 4096 + 1))
        os.utime(path, ns=(0, (n + 1) * 10**9))
        ids.append(block)
    return ids


def test_a_million_files(options, memory_directory, record_property):
    """Pinned: they are counted, the oldest go, in bounded memory; a lookup costs the same."""
    root, count = memory_directory / "store", 1_000_000
    _make_files(memory_directory / "few", 0, 1000)
    ids = _make_files(root, 0, count)
    few = Store(options(storage_backends=[str(memory_directory / "few")]))
    many = Store(options(storage_backends=[str(root)]))
    spread = np.random.default_rng(1).choice(count, 1000, replace=False)
    few_us, same_us, spread_us = _lookup_us(
        [
            (few, b"".join(ids[:1000])),
            (many, b"".join(ids[:1000])),
            (many, b"".join(ids[n] for n in spread)),
        ]
    )
    few.close()
    many.close()

    capacity = count * 4096
    before = _resident_kib()
    begin = time.monotonic()
    store = Store(
        options(
            storage_backends=[str(root)],
            posix_capacities=[capacity],
            posix_high_watermark_percent=90,
            posix_low_watermark_percent=80,
        )
    )
    try:
        _wait(lambda: 0 < store.stats()["posix_used_bytes"] <= capacity * 8 // 10, 600)
        _wait(lambda: store.stats()["evicted_blocks"] >= count // 5, 60)
        seconds = time.monotonic() - begin
        grown = _resident_kib() - before
        counters = store.stats()
    finally:
        store.close()
    left = [
        (root / "model-0123456789abcdef" / "blocks" / block.hex()[:3] / block.hex()).exists()
        for block in ids
    ]
    print(
        f"lookup {few_us:.2f} us a key among 1,000 files; among 1,000,000 {same_us:.2f} of the "
        f"same keys ({same_us / few_us:.2f} times), {spread_us:.2f} of any "
        f"({spread_us / few_us:.2f}); "
        f"{counters['evicted_blocks']} evicted in {seconds:.0f} s, {grown} KiB more memory"
    )
    record_property("lookup_ratio", same_us / few_us)
    assert sum(left) * 4096 == counters["posix_used_bytes"]
    assert left == sorted(left)  # the oldest have gone, and only they
    assert grown < 64 * 1024


def test_a_working_set_of_three_times_the_capacity(options, memory_directory):
    """Pinned: the hot set stays mostly in; the hit rate is near that of an ideal LRU."""
    blocks, capacity = 768, 256
    rng = np.random.default_rng(2)
    wanted = rng.zipf(1.2, 20000) % blocks
    memory = Memory(1, [100, 37], seed=3)
    ids = [hashlib.blake2b(str(n).encode(), digest_size=16).digest() for n in range(blocks)]
    store = Store(
        options(
            storage_backends=[str(memory_directory / "store")],
            posix_capacities=[capacity * FILE],
        )
    )
    lru = OrderedDict()
    hits = ideal = 0
    try:
        for n in wanted:
            n = int(n)
            if n in lru:
                ideal += 1
                lru.move_to_end(n)
            else:
                lru[n] = None
                if len(lru) > capacity:
                    lru.popitem(last=False)
            call = (ids[n], memory.addresses(), memory.lengths())
            if store.load(*call) == [Code.OK]:
                hits += 1
            else:
                store.dump(*call)
        counters = store.stats()
    finally:
        store.close()
    print(f"hit rate {hits / len(wanted):.4f}, of an ideal LRU {ideal / len(wanted):.4f}")
    assert counters["posix_used_bytes"] <= capacity * FILE
    assert counters["evicted_blocks"] > 0
    assert hits > 0.9 * ideal
