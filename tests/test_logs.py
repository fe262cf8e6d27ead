"""What CacheStore logs: how much, how often, and what of a batch at debug."""

import logging
import re

import pytest

import host_pools
from backends import keys
from cachestore_connector import log_level
from cachestore_connector.throttle import Throttle


@pytest.fixture
def level(monkeypatch):
    """``level(word)``: the level of our logger with that in the environment, set back later."""
    logger = logging.getLogger("cachestore")
    before = logger.level
    monkeypatch.setattr(log_level, "_applied", "")

    def apply(word):
        log_level.apply({} if word is None else {"CACHESTORE_LOG_LEVEL": word})
        return logger.level

    yield apply
    logger.setLevel(before)


@pytest.mark.parametrize("word", ["debug", "Info", " WARNING ", "error"])
def test_the_level_is_our_loggers_alone(level, word):
    """Pinned: any case, blanks around; other loggers keep theirs."""
    others = logging.getLogger().level, logging.getLogger("sglang").level
    assert level(word) == getattr(logging, word.strip().upper())
    assert others == (logging.getLogger().level, logging.getLogger("sglang").level)


def test_no_level_leaves_it(level):
    """Pinned: not set, or set to nothing, is SGLang's level."""
    before = logging.getLogger("cachestore").level
    assert level(None) == level("") == before


def test_a_wrong_level_is_said_once(level, caplog):
    """Pinned: the warning names variable, value and what is allowed; the level stays."""
    before = logging.getLogger("cachestore").level
    assert level("loud") == level("loud") == before
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("CACHESTORE_LOG_LEVEL", "'loud'", "debug, info, warning, error"):
        assert part in record.message


def test_at_debug_a_line_for_each_batch(attach, caplog):
    """Pinned: keys, first and last, shortened; pages, bytes; milliseconds of each stage."""
    pool = host_pools.mha_pool(fill=1)
    backend = attach(pool)
    page = backend._pools["kv"].layout.page_bytes
    names = [f"{i:02x}" * 32 for i in (0xAB, 0xCD, 0xEF)]
    with caplog.at_level(logging.INFO, "cachestore"):
        backend.batch_set_v1(names, host_pools.indices(pool, range(3)))
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "cachestore"):
        backend.batch_exists([*names, "00" * 32])
        backend.batch_get_v1(["00" * 32, *names], host_pools.indices(pool, range(4)))
        backend.batch_set_v1(names[:1], host_pools.indices(pool, [0]))
    lookup, load, dump = (r.message for r in caplog.records)
    ms = r"\d+\.\d\d ms"
    assert re.fullmatch(
        rf"CacheStore: lookup of 4 pages, abababababab\.\.000000000000: 3 can be restored; {ms}",
        lookup,
    )
    stages = f"addresses {ms}, block ids {ms}, transfer {ms}"
    assert re.fullmatch(
        r"CacheStore: load of 4 pages of kv, 000000000000\.\.efefefefefef: 3 done, "
        rf"{3 * page} bytes; {stages}",
        load,
    )
    assert re.fullmatch(
        rf"CacheStore: dump of 1 pages of kv, abababababab: 1 done, {page} bytes; {stages}", dump
    )


def test_an_attach_is_one_record(attach, caplog, tmp_path):
    """Pinned: pipeline and why, identity, sizes, memory, directories; nothing else at info."""
    with caplog.at_level(logging.INFO, "cachestore"):
        backend = attach(host_pools.mla_pool(), is_mla=True, extra={"posix_capacity_gb": 2})
    (record,) = caplog.records
    lines = record.message.splitlines()
    assert all(line.startswith("CacheStore: ") for line in lines)
    pipeline, pool, memory, directories = lines
    assert pipeline.startswith("CacheStore: pipeline Cache|Posix (store_pipeline is not set")
    assert backend.identity.directory_name in pool and "pages of 16 tokens" in pool
    assert "MLATokenToKVPoolHost" in pool and "bytes in" in pool and "page_first_direct" in pool
    assert f"{backend.counters()['cache_slots']} slots" in memory and "shared, made" in memory
    assert f"in {tmp_path}, 4096 bytes a slot, 50 % of them" in memory
    assert f"directories: {tmp_path / 'store'}; room for 2 GiB of blocks" in directories


@pytest.fixture
def throttle():
    """A throttle of 10 s whose clock is ``throttle.now``."""

    class Clocked(Throttle):
        now = 0.0

    made = Clocked(logging.getLogger("cachestore"), 10.0, lambda: made.now)
    return made


def test_what_is_left_out_is_counted(throttle, caplog):
    """Pinned: one a kind and interval; the next says how many there were meanwhile."""
    for i in range(100):
        throttle.log(logging.ERROR, "disk", f"disk {i}")
    throttle.log(logging.WARNING, "queue", "queue")
    throttle.now = 10.0
    throttle.log(logging.ERROR, "disk", "disk again")
    throttle.now = 20.0
    throttle.log(logging.ERROR, "disk", "disk at last")
    assert [r.message for r in caplog.records] == [
        "CacheStore: disk 0",
        "CacheStore: queue",
        "CacheStore: disk again (and 99 more like it)",
        "CacheStore: disk at last",
    ]


def test_what_is_left_out_at_the_end_is_said(throttle, caplog):
    """Pinned: the last of each kind and how many, once; nothing where nothing was left out."""
    for i in range(3):
        throttle.log(logging.ERROR, "disk", f"disk {i}")
    throttle.log(logging.WARNING, "queue", "queue")
    throttle.tell_left_out()
    throttle.tell_left_out()
    texts = [r.message for r in caplog.records]
    assert texts[2:] == ["CacheStore: disk 2 (2 like it, this the last, weren't logged)"]


def test_a_detach_says_what_was_left_out(attach, caplog):
    """Pinned: a hundred failures give two lines, and both together say all of them."""
    pool = host_pools.mha_pool()
    backend = attach(pool)
    for _ in range(100):
        assert backend.batch_get_v1(keys(2), host_pools.indices(pool, [0])) == [False] * 2
    backend.close()
    first, last = [r.message for r in caplog.records if "batch_get_v1 failed" in r.message]
    assert "(99 like it, this the last, weren't logged)" in last and "like it" not in first
