"""One process of `cachestore bench`: pages in memory, a store, plain files and copies beside it.

Reads a line of JSON for each command, and answers with one: how long it took, or ``error``.
Its end, or that of who started it, ends what it has open.
"""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import config as settings
from .. import identity as identities
from ..errors import CacheStoreError, Code
from ..opening import open_store
from ..store import Store

MOST_THREADS = 8
LOOKUP_KEYS = 128  # SGLang's batch
_LOOKUPS = 8
_PATIENCE = 60.0
_ALIGNMENT = 4096


class WrongResult(CacheStoreError):
    """A store or a plain file didn't do what was asked."""


class Memory:
    """``count`` pages of tensors, one after another, each page aligned as a host pool's is.

    ``fill``: with bytes that nothing can compress, the same in every process.
    """

    def __init__(self, count: int, tensor_sizes: Sequence[int], fill: bool) -> None:
        self.page_bytes = sum(tensor_sizes)
        self._stride = -(-self.page_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = mmap.mmap(-1, max(1, count) * self._stride)
        self._anchor = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        self.base = ctypes.addressof(self._anchor)
        for page in range(count):
            at = page * self._stride
            size = self._stride
            content = random.Random(page).randbytes(size) if fill else bytes(size)
            self._memory[at : at + size] = content  # if only to have it mapped
        whole = memoryview(self._memory)
        addresses = array.array("Q")
        self.parts: list[list[memoryview]] = []
        for page in range(count):
            at, parts = page * self._stride, []
            for size in tensor_sizes:
                addresses.append(self.base + at)
                parts.append(whole[at : at + size])
                at += size
            self.parts.append(parts)
        self.addresses = memoryview(addresses)

    def page(self, number: int) -> int:
        """The address of a page."""
        return self.base + number * self._stride

    def spoil(self) -> None:
        """Nothing in it is what it was."""
        ctypes.memset(self.base, 0, len(self._memory))


class Worker:
    """What a command does; not for use from several threads."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._sizes = tuple(job["tensor_sizes"])
        self._pages = job["pages"]
        self._source = Memory(self._pages, self._sizes, fill=True)
        self._target = Memory(self._pages, self._sizes, fill=False)
        self._buffer: Memory | None = None
        self._lengths = memoryview(array.array("Q", self._sizes * self._pages))
        self._store: Store | None = None
        self._identity: identities.Identity | None = None
        self._threads = ThreadPoolExecutor(MOST_THREADS)
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def open(self, pipeline: str, given: dict[str, Any], shared: bool) -> dict[str, Any]:
        """Open a store. ``given``: settings. ``shared``: all processes have the same pages."""
        job = self._job
        self._identity = identities.from_parts(
            model_identity="cachestore-bench",
            dtype=job["dtype"],
            layout=job["layout"],
            page_size=job["page_size"],
            tensor_sizes=self._sizes,
            is_mla=job["is_mla"],
            tp_rank=job["rank"],
            tp_size=job["processes"],
            tp_replicated=shared,
        )
        config = settings.load(given, {})
        self._store = open_store(config, pipeline, self._identity, self._sizes)
        return {}

    def close(self) -> dict[str, Any]:
        """Close the store."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        return {}

    def dump(self, label: str, count: int) -> dict[str, Any]:
        """Store the first pages under keys of this label, and say whether all went to a cache."""
        store, ids = self._opened(), self._ids(label, count)
        before = store.stats()["cache_dumped"]
        where, lengths = self._ranges(self._source, count)
        spent, codes = _timed(lambda: store.dump(ids, where, lengths))
        _all_well("dump", codes, count)
        return spent | {"cached": store.stats()["cache_dumped"] - before}

    def load(self, label: str, count: int) -> dict[str, Any]:
        """Load the first pages, and say how many a cache had."""
        store, ids = self._opened(), self._ids(label, count)
        before = store.stats()
        where, lengths = self._ranges(self._target, count)
        spent, codes = _timed(lambda: store.load(ids, where, lengths))
        _all_well("load", codes, count)
        after = store.stats()
        names = ("cache_hit", "cache_waited")
        return spent | {"cached": sum(after[name] - before[name] for name in names)}

    def restore(self, label: str, count: int) -> dict[str, Any]:
        """What SGLang does with a prefix: look up how much is there, and load it."""
        store, ids = self._opened(), self._ids(label, count)
        where, lengths = self._ranges(self._target, count)

        def both() -> list[int]:
            found = store.lookup_prefix(ids)
            return store.load(ids, where, lengths) if found == count else []

        spent, codes = _timed(both)
        _all_well("restore", codes, count)
        return spent

    def lookup(self, label: str, count: int) -> dict[str, Any]:
        """Microseconds a key, of a batch as SGLang asks for it."""
        store, ids = self._opened(), self._ids(label, count)
        ids = (ids * -(-LOOKUP_KEYS // count))[: 16 * LOOKUP_KEYS]
        return self._looked_up(lambda: sum(store.lookup(ids)))

    def spoil(self) -> dict[str, Any]:
        """Let nothing that was loaded be mistaken for what will be."""
        self._target.spoil()
        return {}

    def compare(self, count: int) -> dict[str, Any]:
        """Raise `WrongResult` unless the first pages were loaded as they were dumped."""
        for page in range(count):
            size = self._source.page_bytes
            if self._memcmp(self._source.page(page), self._target.page(page), size):
                raise WrongResult(f"page {page} was loaded other than it was dumped")
        return {}

    def settle(self) -> dict[str, Any]:
        """Wait until everything in the cache is in files too."""
        store, until = self._opened(), time.monotonic() + _PATIENCE
        while store.stats()["cache_slots_dirty"]:
            if time.monotonic() > until:
                raise WrongResult("the storage is too slow: the cache isn't stored after a minute")
            time.sleep(0.002)
        return {}

    # Plain calls of the same bytes.

    def plain_dump(self, paths: list[str], count: int, threads: int, direct: bool) -> dict:
        """A file a page: open, pwritev, close."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        return self._plain(paths[:count], flags, self._source, os.pwritev, threads)

    def plain_load(self, paths: list[str], count: int, threads: int, direct: bool) -> dict:
        """Open, preadv, close."""
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        return self._plain(paths[:count], flags, self._target, os.preadv, threads)

    def plain_lookup(self, paths: list[str], count: int) -> dict[str, Any]:
        """One stat a key."""
        batch = (paths[:count] * -(-LOOKUP_KEYS // count))[:LOOKUP_KEYS]
        return self._looked_up(lambda: sum(os.stat(path).st_size > 0 for path in batch))

    def copy(self, into: bool, count: int, threads: int) -> dict[str, Any]:
        """Plain memmove between the pages and another piece of memory, as a cache is one."""
        if self._buffer is None:
            self._buffer = Memory(self._pages, self._sizes, fill=False)
        buffer = self._buffer
        tensors, move = len(self._sizes), ctypes.memmove
        ours = (self._source if into else self._target).addresses

        def some(first: int) -> None:
            for page in range(first, count, threads):
                for at in range(page * tensors, (page + 1) * tensors):
                    theirs = buffer.addresses[at]
                    to, of = (theirs, ours[at]) if into else (ours[at], theirs)
                    move(to, of, self._lengths[at])

        return self._in_threads(some, threads)

    def _plain(
        self, paths: list[str], flags: int, memory: Memory, move: Callable, threads: int
    ) -> dict[str, Any]:
        def some(first: int) -> None:
            for page in range(first, len(paths), threads):
                opened = os.open(paths[page], flags, 0o600)
                try:
                    done = move(opened, memory.parts[page], 0)
                finally:
                    os.close(opened)
                if done != memory.page_bytes:
                    raise WrongResult(f"{paths[page]}: {done} bytes of {memory.page_bytes}")

        return self._in_threads(some, threads)

    def _in_threads(self, some: Callable[[int], None], threads: int) -> dict[str, Any]:
        def all_of_it() -> list[None]:
            if threads == 1:
                return [some(0)]
            return list(self._threads.map(some, range(threads)))

        return _timed(all_of_it)[0]

    def _looked_up(self, call: Callable[[], int]) -> dict[str, Any]:
        walls = []
        for _ in range(_LOOKUPS):
            spent, found = _timed(call)
            walls.append((spent["end"] - spent["start"]) / LOOKUP_KEYS * 1e6)
            if found != LOOKUP_KEYS:
                raise WrongResult(f"lookup found {found} of {LOOKUP_KEYS}")
        return {"us_per_key": statistics.median(walls)}

    def _opened(self) -> Store:
        if self._store is None:
            raise WrongResult("no store is open")
        return self._store

    def _ids(self, label: str, count: int) -> bytes:
        assert self._identity is not None
        return self._identity.block_ids(f"{label}/{number}" for number in range(count))

    def _ranges(self, memory: Memory, count: int) -> tuple[memoryview, memoryview]:
        used = count * len(self._sizes)
        return memory.addresses[:used], self._lengths[:used]


def _timed(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Start and end, on the clock that all processes have, and the result."""
    start = time.monotonic()
    result = call()
    return {"start": start, "end": time.monotonic()}, result


def _all_well(what: str, codes: Sequence[int], count: int) -> None:
    wrong = [code for code in codes if code != Code.OK]
    if len(codes) != count:
        raise WrongResult(f"{what} found less than the {count} pages that were dumped")
    if wrong:
        names = ", ".join(sorted({Code(code).name for code in wrong}))
        raise WrongResult(f"{what} of {count} pages: {len(wrong)} ended with {names}")


def main() -> None:
    """Do what standard input says until it ends."""
    # What only a bug prints goes to standard error, not between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if worker is None:
                worker = Worker(command)
                answer: dict[str, Any] = {}
            else:
                answer = getattr(worker, command.pop("do"))(**command)
        except (CacheStoreError, OSError, MemoryError) as error:
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)
