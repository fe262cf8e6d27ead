"""The native store's handle: open, lookups, loads, dumps, counters, close.

Everything here speaks block ids, addresses and sizes; page keys, host pools and SGLang are
further up. Safe to call from any thread; the interpreter lock is released while native code runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ._ffi import ffi, lib
from .errors import Code, StoreClosed, check

BLOCK_ID_BYTES = 16
_ZERO_COPY = {"auto": 0, "always": 1, "never": 2}
_DIRECT: dict[bool | str, int] = {False: 0, True: 1, "required": 2}
_VERIFY = {"always": 0, "sample": 1, "never": 2}
_EVENT_TEXT_BYTES = 4096
# A request for another pool than the first goes in pieces of this share of the queue, which find
# room beside others.
_SIDE_SHARE = 8
# Seconds between two tries of what found the queue full: the first, and twice as long each time.
_REFUSED_PAUSE = 0.005
_LONGEST_REFUSED_PAUSE = 0.05

# Of `Store.stats`: what is so now. All others only grow.
GAUGES = frozenset({
    "load_outstanding", "dump_outstanding", "stuck_workers",
    "cache_slots", "cache_slots_free", "cache_slots_dirty", "cache_slots_loading",
    "cache_load_queued", "cache_load_running", "cache_dump_queued", "cache_dump_running",
    "posix_used_bytes", "posix_capacity_bytes", "posix_directories", "posix_directories_out",
    "posix_directories_read_only", "posix_directories_full", "posix_collecting",
    "posix_uses_pending",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """What a pool of a native store is: whose blocks, and their sizes.

    ``tensor_sizes``, ``shard_size``, ``block_size``: bytes. ``identity_fingerprint``: 32 bytes.
    """

    identity_name: str
    identity_manifest: str
    identity_fingerprint: bytes
    tensor_sizes: Sequence[int]
    shard_size: int
    block_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreOptions(PoolOptions):
    """What a native store is opened with, and its pool 0; checked there, field by field.

    Names as in `cachestore_connector.config.Config`.
    """

    pipeline: str
    storage_backends: Sequence[str]
    posix_load_worker_number: int
    posix_dump_worker_number: int
    posix_queue_depth: int
    io_direct: bool | str
    posix_zero_copy: str
    timeout_ms: int
    verify: str = "always"
    posix_capacities: Sequence[int] | None = None
    posix_free_space_reserve: int = 0
    posix_high_watermark_percent: int = 97
    posix_low_watermark_percent: int = 95
    share_buffer_enable: bool = True
    cache_buffer_directory: str = "/dev/shm"
    cache_buffer_capacity: int = 0
    cache_h2h_worker_number: int = 4
    cache_h2h_queue_depth: int = 1024
    cache_h2h_cpu_affinity: str = "auto"
    cache_peer_timeout_ms: int = 5000
    cache_dirty_percent: int = 50

    @property
    def piece(self) -> int:
        """The most blocks that one native request may have."""
        if self.pipeline == "Posix":
            return self.posix_queue_depth
        return min(self.posix_queue_depth, self.cache_h2h_queue_depth)


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened in the background. ``level``: a `logging` level number."""

    level: int
    text: str


_LEVELS = {0: 20, 1: 30, 2: 40}  # cs_event_level -> logging's INFO, WARNING, ERROR

_forks = 0  # that this process has been through


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Store:
    """An open native store. `close` ends it; after that every call raises `StoreClosed`.

    As does every call in a forked child, which has no part in it.
    """

    def __init__(self, options: StoreOptions) -> None:
        """Open it. Raises `StoreError` with the field that is wrong or the failing system call."""
        self._options = options
        self._forks = _forks
        self._condition = threading.Condition()
        self._inside = 0  # calls that hold the handle; guarded by _condition
        self._handle: Any = None  # None once closing; guarded by _condition
        out = ffi.new("cs_store **")
        config, alive = _native_config(options)
        _check(lib.cs_open(config, out))
        del alive
        self._handle = out[0]
        self._tensor_counts = {0: len(options.tensor_sizes)}  # of a shard, by pool

    def open_pool(self, options: PoolOptions) -> int:
        """Open a further pool and give its number, for the calls that take one.

        It keeps what else belongs to the blocks of pool 0, under the same ids: see c_api.h. It is
        closed with the store. Raises `StoreError` as opening does.
        """
        config = ffi.new("cs_pool_config *")
        alive = _set_pool(config, options)
        number = ffi.new("uint32_t *")
        with self._call() as handle:
            _check(lib.cs_open_pool(handle, config, number))
        del alive
        self._tensor_counts[number[0]] = len(options.tensor_sizes)
        return number[0]

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        """The handle, which stays valid inside the block."""
        self._check_fork()
        with self._condition:
            if self._handle is None:
                raise StoreClosed("the store is closed", Code.CLOSED)
            handle = self._handle
            self._inside += 1
        try:
            yield handle
        finally:
            with self._condition:
                self._inside -= 1
                if self._inside == 0:
                    self._condition.notify_all()

    def _check_fork(self) -> None:
        # Threads that aren't here may hold the lock, and be counted as inside, for ever.
        if self._forks != _forks:
            raise StoreClosed("the store was opened before this process was forked", Code.CLOSED)

    def lookup(self, block_ids: bytes, pool: int = 0) -> list[bool]:
        """Whether each block is stored. ``block_ids``: 16 bytes each, one after another."""
        count = _count(block_ids)
        present = ffi.new("uint8_t[]", count)
        with self._call() as handle:
            _check(lib.cs_lookup(handle, pool, count, ffi.from_buffer(block_ids), present))
        return [byte == 1 for byte in ffi.unpack(present, count)] if count else []

    def lookup_prefix(self, block_ids: bytes, pool: int = 0) -> int:
        """How many of the first blocks are stored without a gap."""
        length = ffi.new("size_t *")
        with self._call() as handle:
            count = _count(block_ids)
            ids = ffi.from_buffer(block_ids)
            _check(lib.cs_lookup_prefix(handle, pool, count, ids, length))
        return length[0]

    def load(
        self,
        block_ids: bytes,
        addresses: Any,
        sizes: Any,
        parent_id: bytes | None = None,
        pool: int = 0,
    ) -> list[int]:
        """Read blocks of one shard into memory; one `Code` a block, in order.

        ``addresses``, ``sizes``: buffers of native uint64, one a tensor, block after block. The
        memory must stay valid until this returns; it isn't written afterwards. ``parent_id``: the
        id of the block before the first one in its prefix, if it is known; a cache keeps what
        comes first longest. A request of more blocks than the queue is deep goes in pieces; one
        that finds the queue full ends with `Code.REFUSED` for each of its blocks; a load of
        another pool than 0, and every dump, waits for room first. Takes at most ``timeout_ms`` for
        each piece (twice that where it waits for room), but for I/O on a local filesystem, which
        is waited for.
        """
        return self._transfer(lib.cs_load, block_ids, addresses, sizes, parent_id, pool)

    def dump(
        self,
        block_ids: bytes,
        addresses: Any,
        sizes: Any,
        parent_id: bytes | None = None,
        pool: int = 0,
    ) -> list[int]:
        """Store blocks of one shard from memory, as `load` does the reverse."""
        return self._transfer(lib.cs_dump, block_ids, addresses, sizes, parent_id, pool)

    def _transfer(
        self,
        start: Any,
        block_ids: bytes,
        addresses: Any,
        sizes: Any,
        parent_id: bytes | None,
        pool: int,
    ) -> list[int]:
        count = _count(block_ids)
        if parent_id is not None and len(parent_id) != BLOCK_ID_BYTES:
            raise ValueError(f"parent_id has {len(parent_id)} bytes, not {BLOCK_ID_BYTES}")
        parent = ffi.NULL if parent_id is None else ffi.from_buffer("uint8_t[]", parent_id)
        ids = ffi.from_buffer("uint8_t[]", block_ids)
        where = ffi.from_buffer("uint64_t[]", addresses)
        lengths = ffi.from_buffer("uint64_t[]", sizes)
        tensors = self._tensor_counts.get(pool)
        if tensors is None:
            raise ValueError(f"pool {pool} isn't open; {sorted(self._tensor_counts)} are")
        for name, array in (("addresses", addresses), ("sizes", sizes)):
            if memoryview(array).format not in ("q", "l", "Q", "L"):
                raise ValueError(f"{name} must be 64-bit integers")
        if len(where) != count * tensors or len(lengths) < count * tensors:
            raise ValueError(
                f"{count} blocks of {tensors} tensors need {count * tensors} addresses and sizes, "
                f"got {len(where)} and {len(lengths)}"
            )
        results: list[int] = []
        piece = self._options.piece
        if pool != 0:
            piece = max(1, piece // _SIDE_SHARE)
        for first in range(0, count, piece):
            n = min(piece, count - first)
            batch = ffi.new(
                "cs_batch *",
                {
                    "n": n,
                    "block_ids": ids + BLOCK_ID_BYTES * first,
                    "m": tensors,
                    "addresses": where + tensors * first,
                    "sizes": lengths + tensors * first,
                    "parent_id": ids + BLOCK_ID_BYTES * (first - 1) if first else parent,
                    "pool": pool,
                },
            )
            results += self._run(start, batch, n, waits=pool != 0 or start is lib.cs_dump)
        return results

    def _run(self, start: Any, batch: Any, n: int, *, waits: bool) -> list[int]:
        deadline = time.monotonic() + self._options.timeout_ms / 1000
        results, pause = self._run_once(start, batch, n), _REFUSED_PAUSE
        # A dump that is given up leaves the rest of its prefix unstored: behind a cache pages come
        # faster than files are written. And a load of what belongs to pages of pool 0 is of no
        # use to those without it.
        while waits and Code.REFUSED in results and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_REFUSED_PAUSE)
            refused = [i for i, code in enumerate(results) if code == Code.REFUSED]
            part, _kept = _part(batch, refused)
            for i, code in zip(refused, self._run_once(start, part, len(refused)), strict=True):
                results[i] = code
        return results

    def _run_once(self, start: Any, batch: Any, n: int) -> list[int]:
        task = ffi.new("cs_task *")
        codes = ffi.new("int32_t[]", n)
        with self._call() as handle:
            started = start(handle, batch, task)
            if started in (Code.REFUSED, Code.CLOSED):
                return [int(started)] * n
            _check(started)
            _check(lib.cs_wait(handle, task[0], self._options.timeout_ms, codes, n))
        return ffi.unpack(codes, n)

    def clear(self) -> None:
        """Forget every block of this store's pools. Raises `StoreError` if a directory can't."""
        with self._call() as handle:
            _check(lib.cs_clear(handle))

    def stats(self) -> dict[str, int]:
        """The native counters (``cs_stats``) by name, since the store was opened."""
        with self._call() as handle:
            return _stats(handle)

    def events(self) -> list[Event]:
        """What happened in the background since the last call, oldest first; bounded."""
        with self._call() as handle:
            return _events(handle)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process is a forked child."""
        if self._forks != _forks:
            return True
        with self._condition:
            return self._handle is None

    def close(self) -> tuple[dict[str, int], list[Event]]:
        """End it: what is running completes, what is queued fails, threads are joined.

        Waits for calls of other threads to leave, which the store makes them do. Returns the
        counters and the last events; nothing of either from a second call or in a forked child,
        where it does nothing.
        """
        if self._forks != _forks:
            return {}, []
        with self._condition:
            handle, self._handle = self._handle, None
        if handle is None:
            return {}, []
        lib.cs_shutdown(handle)
        with self._condition:
            self._condition.wait_for(lambda: self._inside == 0)
        last = _stats(handle), _events(handle)
        lib.cs_close(handle)
        return last


def crc32c(data: bytes, seed: int = 0) -> int:
    """The checksum of the block format (CRC-32C) of ``data`` after bytes whose sum is ``seed``."""
    return lib.cs_crc32c(seed, ffi.from_buffer(data), len(data))


def _part(batch: Any, blocks: list[int]) -> tuple[Any, list[Any]]:
    """Some of a cs_batch's blocks, as one of their own, and what its pointers point into."""
    if len(blocks) == batch.n:
        return batch, []
    tensors = batch.m
    ids = [batch.block_ids[BLOCK_ID_BYTES * i + b] for i in blocks for b in range(BLOCK_ID_BYTES)]
    kept = [ffi.new("uint8_t[]", ids)] + [
        ffi.new("uint64_t[]", [array[tensors * i + t] for i in blocks for t in range(tensors)])
        for array in (batch.addresses, batch.sizes)
    ]
    fields = {
        "n": len(blocks),
        "block_ids": kept[0],
        "m": tensors,
        "addresses": kept[1],
        "sizes": kept[2],
        "parent_id": batch.parent_id if blocks[0] == 0 else ffi.NULL,
        "pool": batch.pool,
    }
    return ffi.new("cs_batch *", fields), kept


def _native_config(options: StoreOptions) -> tuple[Any, list[Any]]:
    """A cs_config, and what its pointers point into: keep that alive as long."""
    strings = [ffi.new("char[]", path.encode("utf-8", "surrogateescape"))
               for path in options.storage_backends]  # fmt: skip
    pipeline = ffi.new("char[]", options.pipeline.encode())
    backends = ffi.new("char *[]", strings)
    config = ffi.new("cs_config *")
    pool = _set_pool(config, options)
    config.pipeline = pipeline
    config.storage_backends = backends
    config.storage_backend_count = len(strings)
    config.posix_load_worker_number = options.posix_load_worker_number
    config.posix_dump_worker_number = options.posix_dump_worker_number
    config.posix_queue_depth = options.posix_queue_depth
    config.io_direct = _DIRECT[options.io_direct]
    config.posix_zero_copy = _ZERO_COPY[options.posix_zero_copy]
    config.timeout_ms = options.timeout_ms
    config.verify = _VERIFY[options.verify]
    capacities = ffi.NULL
    if options.posix_capacities is not None:
        if len(options.posix_capacities) != len(strings):
            raise ValueError("posix_capacities: one for each of storage_backends")
        capacities = ffi.new("uint64_t[]", list(options.posix_capacities))
    config.posix_capacities = capacities
    config.posix_free_space_reserve = options.posix_free_space_reserve
    config.posix_high_watermark_percent = options.posix_high_watermark_percent
    config.posix_low_watermark_percent = options.posix_low_watermark_percent
    directory = ffi.new("char[]", os.fsencode(options.cache_buffer_directory))
    affinity = ffi.new("char[]", options.cache_h2h_cpu_affinity.encode())
    config.share_buffer_enable = int(options.share_buffer_enable)
    config.cache_buffer_directory = directory
    config.cache_buffer_capacity = options.cache_buffer_capacity
    config.cache_h2h_worker_number = options.cache_h2h_worker_number
    config.cache_h2h_queue_depth = options.cache_h2h_queue_depth
    config.cache_h2h_cpu_affinity = affinity
    config.cache_peer_timeout_ms = options.cache_peer_timeout_ms
    config.cache_dirty_percent = options.cache_dirty_percent
    return config, [strings, pipeline, backends, pool, capacities, directory, affinity]


def _set_pool(config: Any, options: PoolOptions) -> list[Any]:
    """Fill in what a cs_config and a cs_pool_config have; as `_native_config`."""
    name = ffi.new("char[]", options.identity_name.encode())
    manifest = ffi.new("char[]", options.identity_manifest.encode("utf-8", "surrogateescape"))
    sizes = ffi.new("uint64_t[]", list(options.tensor_sizes))
    config.struct_size = ffi.sizeof(config[0])
    config.identity_name = name
    config.identity_manifest = manifest
    config.identity_fingerprint = options.identity_fingerprint
    config.tensor_sizes = sizes
    config.tensor_count = len(options.tensor_sizes)
    config.shard_size = options.shard_size
    config.block_size = options.block_size
    return [name, manifest, sizes]


def _stats(handle: Any) -> dict[str, int]:
    stats = ffi.new("cs_stats *")
    _check(lib.cs_get_stats(handle, stats))
    return {name: getattr(stats, name) for name, _ in ffi.typeof("cs_stats").fields}


def _events(handle: Any) -> list[Event]:
    text = ffi.new("char[]", _EVENT_TEXT_BYTES)
    level = ffi.new("int32_t *")
    events = []
    while lib.cs_next_event(handle, text, _EVENT_TEXT_BYTES, level):
        decoded = ffi.string(text).decode("utf-8", "replace")
        events.append(Event(_LEVELS.get(level[0], 40), decoded))
    return events


def _count(block_ids: bytes) -> int:
    count, rest = divmod(len(block_ids), BLOCK_ID_BYTES)
    if rest:
        raise ValueError(f"block_ids has {len(block_ids)} bytes, not a multiple of 16")
    return count


def _check(code: int) -> None:
    if code != Code.OK:
        check(code, ffi.string(lib.cs_last_error()).decode("utf-8", "replace"))
