"""What `cachestore bench` measures: the store, and beside it plain calls of the same bytes.

In a round the processes dump their pages at the same time, load and look them up; then the same
bytes go by plain calls, and what was written is removed. A warm-up round compares what is loaded
with what was dumped, and finds with how many threads the plain calls are fastest.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .. import config as settings
from .. import on_disk
from ..mounts import mount_of
from . import bench_scratch as scratch
from .bench_processes import Processes, ProcessFailed, processes
from .bench_shapes import Shape

DUMP, DUMP_SYNCED, LOAD_DISK, LOAD, LOOKUP = "dump", "dump_synced", "load_disk", "load", "lookup"
CACHE_DUMP, CACHE_HIT = "cache_dump", "cache_hit"
GB_PER_S, US_PER_KEY = "GB/s", "us/key"

_POSIX = "Posix"
_THREADS = (1, 2, 4, 8)
_FEWEST_PAGES, _MOST_PAGES = 4, 1024
_WARM_UPS = 3  # of a cache: each of its slots is to be mapped
_REPEATS = 3  # of what is done in a moment, and changes nothing
_TURNS = 10  # of the warm-up's length, that a step takes at least
_MARGIN = 64 << 20
_SLOT_BYTES = 1024  # of a buffer's slot, beside the page: plenty
_LEAST_BUFFER = 2 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """``counts``: of processes. ``size``: bytes that all of them move in a round, about.

    ``rounds``: at most, as far as ``seconds`` allow. ``given``: the server's settings.
    """

    shape: Shape
    counts: Sequence[int]
    size: int
    rounds: int
    seconds: float
    given: settings.Config

    def pages(self, count: int) -> int:
        """Of each process."""
        fit = self.size // (count * self.shape.page_bytes)
        return min(_MOST_PAGES, max(_FEWEST_PAGES, fit))

    @property
    def most_pages(self) -> int:
        """Of all processes together, at a time."""
        return max(count * self.pages(count) for count in self.counts)

    @property
    def file_bytes(self) -> int:
        """What is in files at a time."""
        return self.most_pages * (self.shape.stored_bytes + 4096) + _MARGIN

    @property
    def memory_bytes(self) -> int:
        """What the processes take: pages to dump, to load into, and for plain copies."""
        return 3 * self.most_pages * self.shape.page_bytes + self.buffer_bytes + _MARGIN

    @property
    def buffer_bytes(self) -> int:
        """Of a buffer that takes a dump whole, and still has an eighth of it for loads."""
        pages = max(self.pages(count) for count in self.counts)
        slots = pages * 100 // min(self.given.cache_dirty_percent, 80) + pages // 2 + 8
        return max(_LEAST_BUFFER, slots * (self.shape.stored_bytes + _SLOT_BYTES))


@dataclasses.dataclass
class Row:
    """``store``, ``plain``: one sample a round. ``threads``: of each process's plain calls."""

    op: str
    processes: int
    unit: str
    store: list[float] = dataclasses.field(default_factory=list)
    plain: list[float] = dataclasses.field(default_factory=list)
    threads: int = 1

    @property
    def of_plain(self) -> float:
        """How fast the store is, by its medians: 1 is as fast as plain calls."""
        store, plain = statistics.median(self.store), statistics.median(self.plain)
        return plain / store if self.unit == US_PER_KEY else store / plain


@dataclasses.dataclass
class Restored:
    """Prefixes looked up and loaded by ``processes`` processes at once: (tokens, seconds)."""

    where: str
    processes: int
    points: list[tuple[int, float]]


@dataclasses.dataclass
class Measured:
    """Everything."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    restored: list[Restored] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)


Say = Callable[[str, float], None]  # what is done, and how much of all of it


def measure(plan: Plan, stores: Sequence[str], buffers: str | None, say: Say) -> Measured:
    """Measure in the directories ``stores``, and if ``buffers`` is one, a cache in it."""
    measured = Measured()
    kinds = [_POSIX] + ([settings.CACHE_POSIX] if buffers is not None else [])
    steps = list(itertools.product(plan.counts, kinds))
    for number, (count, kind) in enumerate(steps):
        what = f"{kind}, {count} process{'es' if count > 1 else ''}"

        def said(part: float, number: int = number, what: str = what) -> None:
            say(what, (number + min(1.0, part)) / len(steps))

        said(0)
        with processes(plan.shape, count, plan.pages(count)) as group:
            step = _Step(plan, group, list(stores), plan.seconds / len(steps), said)
            if kind == _POSIX:
                step.files(measured)
            else:
                assert buffers is not None
                step.cache(measured, buffers)
    return measured


class _Step:
    """One pipeline with one number of processes."""

    def __init__(
        self,
        plan: Plan,
        group: Processes,
        stores: list[str],
        seconds: float,
        said: Callable[[float], None],
    ) -> None:
        self._plan, self._group, self._said = plan, group, said
        self._pages = plan.pages(group.count)
        self._seconds, self._began = seconds, time.monotonic()
        self._homes = [os.path.join(path, "store") for path in stores]
        self._plain = [os.path.join(path, "plain") for path in stores]
        for path in (*self._homes, *self._plain):
            os.makedirs(path, exist_ok=True)
        systems = [mount_of(path) for path in stores]
        self._in_memory = all(each is not None and each.is_in_memory for each in systems)
        sizes = plan.shape.tensor_sizes
        self._direct = bool(plan.given.io_direct) and not any(size % 4096 for size in sizes)
        self._last = group.count == max(plan.counts)

    def files(self, measured: Measured) -> None:
        """The files alone."""
        shared = {"pipeline": _POSIX, "given": self._settings(), "shared": False}
        self._group.do("open", **shared)
        rows = {name: self._row(name) for name in (DUMP, DUMP_SYNCED, LOAD_DISK, LOAD, LOOKUP)}
        self._shrink(_seconds(lambda: self._files_turn(None, 0)))
        self._choose_threads(rows)
        for number in self._rounds():
            self._files_turn(rows, number)
            self._plain_turn(rows, number)
        measured.rows += [row for row in rows.values() if row.store]
        if self._last:
            self._group.do("dump", label="restored", count=self._pages)
            scratch.sync(self._blocks())
            where = "page cache" if self._in_memory else "disk"
            measured.restored.append(self._restored(where, not self._in_memory))
        self._group.do("close")
        self._remove(self._blocks())

    def cache(self, measured: Measured, buffers: str) -> None:
        """A buffer that all processes share, before the files. One process dumps, all load."""
        given = self._settings() | {
            "share_buffer_enable": True,
            "cache_buffer_directory": buffers,
            "cache_buffer_capacity_gb": self._plan.buffer_bytes / 2**30,
        }
        self._group.do("open", pipeline=settings.CACHE_POSIX, given=given, shared=True)
        dumped, hit = (self._row(name) for name in (CACHE_DUMP, CACHE_HIT))
        for number in range(_WARM_UPS):
            self._shrink(_seconds(lambda n=number: self._cache_turn(None, f"warm-up {n}")))
        self._choose_copies(dumped, hit)
        for number in self._rounds():
            self._cache_turn((dumped, hit), f"round {number}")
            for row, into in ((dumped, True), (hit, False)):
                row.plain.append(self._usual_copy(into, row.threads))
        measured.rows += [dumped, hit] if self._group.count == min(self._plan.counts) else [hit]
        if self._last:
            self._group.first("dump", label="restored", count=self._pages)
            self._group.first("settle")
            measured.restored.append(self._restored("shared buffer", False))
        self._group.do("close")
        self._remove(self._blocks())

    def _shrink(self, turn: float) -> None:
        """Take fewer pages where turns are so slow that few of them fit into the time."""
        fit = int(self._pages * self._seconds / (_TURNS * turn))
        self._pages = max(_FEWEST_PAGES, min(self._pages, fit))

    def _rounds(self) -> Iterator[int]:
        """From 1, as many as there is time for, one at least; some is left for prefixes."""
        share = 0.7 if self._last else 1.0
        for number in range(1, self._plan.rounds + 1):
            yield number
            self._said(share * number / self._plan.rounds)
            if time.monotonic() - self._began > self._seconds * share:
                return

    def _files_turn(self, rows: dict[str, Row] | None, number: int) -> None:
        """One round of the store; the warm-up has no rows."""
        group, label = self._group, {"label": f"round {number}", "count": self._pages}
        dumped = _wall(group.do("dump", **label))
        blocks = self._blocks()
        synced = dumped + _seconds(lambda: scratch.sync(blocks))
        from_disk = None
        if not self._in_memory:
            scratch.forget(blocks)
            from_disk = _wall(group.do("load", **label))
        group.do("spoil")
        group.do("load", **label)
        group.do("compare", count=self._pages)
        loaded = _usual(lambda: _wall(group.do("load", **label)))
        looked_up = group.do("lookup", **label)
        self._remove(blocks)
        if rows is None:
            return
        rows[DUMP].store.append(self._rate(dumped))
        if from_disk is not None:
            rows[DUMP_SYNCED].store.append(self._rate(synced))
            rows[LOAD_DISK].store.append(self._rate(from_disk))
        if not self._plan.given.io_direct or self._in_memory:
            rows[LOAD].store.append(self._rate(loaded))
        rows[LOOKUP].store.append(_slowest(looked_up))

    def _plain_turn(self, rows: dict[str, Row], number: int) -> None:
        """The same by plain calls."""
        paths = self._plain_paths(f"round-{number}")
        group, written = self._group, [path for each in paths for path in each]
        dumped = self._moved("plain_dump", paths, rows[DUMP].threads, self._pages)
        synced = dumped + _seconds(lambda: scratch.sync(written))
        rows[DUMP].plain.append(self._rate(dumped))
        if rows[LOAD_DISK].store:
            rows[DUMP_SYNCED].plain.append(self._rate(synced))
            scratch.forget(written)
            loaded = self._moved("plain_load", paths, rows[LOAD_DISK].threads, self._pages)
            rows[LOAD_DISK].plain.append(self._rate(loaded))
        if rows[LOAD].store:
            threads = rows[LOAD].threads
            loaded = _usual(lambda: self._moved("plain_load", paths, threads, self._pages))
            rows[LOAD].plain.append(self._rate(loaded))
        found = group.each("plain_lookup", [{"paths": p, "count": self._pages} for p in paths])
        rows[LOOKUP].plain.append(_slowest(found))
        self._remove(written)

    def _choose_threads(self, rows: dict[str, Row]) -> None:
        """With how many the plain calls are fastest, by a part of the pages."""
        count = max(_FEWEST_PAGES, self._pages // 4)
        fastest: dict[str, float] = {}

        def tried(op: str, threads: int, seconds: float) -> None:
            if seconds < fastest.get(op, float("inf")):
                fastest[op], rows[op].threads = seconds, threads

        for threads in _THREADS:
            paths = self._plain_paths(f"threads-{threads}")
            written = [path for each in paths for path in each[:count]]
            tried(DUMP, threads, self._moved("plain_dump", paths, threads, count))
            scratch.sync(written)
            scratch.forget(written)
            tried(LOAD_DISK, threads, self._moved("plain_load", paths, threads, count))
            for _ in range(_REPEATS):
                tried(LOAD, threads, self._moved("plain_load", paths, threads, count))
            self._remove(written)
        rows[DUMP_SYNCED].threads = rows[DUMP].threads

    def _moved(self, what: str, paths: list[list[str]], threads: int, count: int) -> float:
        def do() -> list[dict[str, Any]]:
            how = {"threads": threads, "direct": self._direct, "count": count}
            return self._group.each(what, [{"paths": each} | how for each in paths])

        try:
            return _wall(do())
        except ProcessFailed as error:
            if not self._direct or os.strerror(errno.EINVAL) not in str(error):
                raise
        self._direct = False  # the file system has no O_DIRECT
        self._remove([path for each in paths for path in each if os.path.exists(path)])
        return _wall(do())

    def _cache_turn(self, rows: tuple[Row, Row] | None, label: str) -> None:
        group, given = self._group, {"label": label, "count": self._pages}
        dumped = group.first("dump", **given)
        group.first("settle")
        group.do("spoil")
        loads = [group.do("load", **given)]
        group.do("compare", count=self._pages)
        loads += [group.do("load", **given) for _ in range(_REPEATS)]
        held = [answer["cached"] for answer in (dumped, *itertools.chain(*loads))]
        if set(held) != {self._pages}:
            raise ProcessFailed(f"of {self._pages} pages the buffer had {held}")
        self._remove(self._blocks())
        if rows is not None:
            rows[0].store.append(self._rate(_wall([dumped]), 1))
            rows[1].store.append(self._rate(statistics.median(map(_wall, loads[1:]))))

    def _choose_copies(self, dumped: Row, hit: Row) -> None:
        for row, into in ((dumped, True), (hit, False)):
            self._copied(into, 1)  # maps the memory
            tries = [(self._copied(into, n), n) for n in _THREADS for _ in range(_REPEATS)]
            row.threads = max(tries)[1]

    def _copied(self, into: bool, threads: int) -> float:
        """GB/s of plain copies: of one process into the buffer, of all out of it."""
        given = {"into": into, "count": self._pages, "threads": threads}
        if into:
            return self._rate(_wall([self._group.first("copy", **given)]), 1)
        return self._rate(_wall(self._group.do("copy", **given)))

    def _usual_copy(self, into: bool, threads: int) -> float:
        return _usual(lambda: self._copied(into, threads), 1 if into else _REPEATS)

    def _restored(self, where: str, forget: bool) -> Restored:
        lengths = [n for n in itertools.takewhile(lambda n: n < self._pages, _doubled(1))]
        points = []
        for length in (*lengths, self._pages):

            def once(length: int = length) -> float:
                if forget:
                    scratch.forget(self._blocks())
                return _wall(self._group.do("restore", label="restored", count=length))

            late = time.monotonic() - self._began > self._seconds
            points.append((length * self._plan.shape.page_size, _usual(once, 1 if late else 3)))
        return Restored(where, self._group.count, points)

    def _settings(self) -> dict[str, Any]:
        """The server's settings, but for where things are and how much room they have."""
        ours = ("tensor_size_list", "shard_size", "block_size", "namespace", "model_identity",
                "posix_capacity_gb", "posix_free_space_reserve_gb", "store_pipeline")  # fmt: skip
        given = dataclasses.asdict(self._plan.given) | {"storage_backends": self._homes}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if name not in ours and value is not None
        }

    def _row(self, op: str) -> Row:
        count = 1 if op == CACHE_DUMP else self._group.count
        return Row(op, count, US_PER_KEY if op == LOOKUP else GB_PER_S)

    def _rate(self, seconds: float, count: int | None = None) -> float:
        """GB/s of all processes."""
        moved = self._pages * self._plan.shape.page_bytes * (count or self._group.count)
        return moved / seconds / 1e9

    def _blocks(self) -> list[str]:
        return [
            str(block.path)
            for home in self._homes
            for identity in on_disk.identities(home)
            for block in on_disk.blocks(identity)
        ]

    def _plain_paths(self, label: str) -> list[list[str]]:
        """Of each process, its files, spread over the directories."""
        return [
            [
                os.path.join(self._plain[page % len(self._plain)], f"{label}-{rank}-{page}")
                for page in range(self._pages)
            ]
            for rank in range(self._group.count)
        ]

    @staticmethod
    def _remove(paths: Iterable[str]) -> None:
        for path in paths:
            os.unlink(path)


def _doubled(number: int) -> Iterator[int]:
    while True:
        yield number
        number *= 2


def _seconds(call: Callable[[], None]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def _usual(call: Callable[[], float], repeats: int = _REPEATS) -> float:
    """The median of what several calls give."""
    return statistics.median(call() for _ in range(repeats))


def _wall(answers: Sequence[dict[str, Any]]) -> float:
    """From the first start to the last end."""
    return max(a["end"] for a in answers) - min(a["start"] for a in answers)


def _slowest(answers: Sequence[dict[str, Any]]) -> float:
    return max(answer["us_per_key"] for answer in answers)
