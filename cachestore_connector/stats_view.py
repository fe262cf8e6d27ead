"""From readings of the stats files to figures: rates between two readings, hit rates, totals."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from . import stats_reader
from .stats_reader import Backend, Problem, State

_REGION_PREFIX = "cachestore-region-"

Counts = Mapping[str, int]

# Loads that were looked for; those that were refused weren't.
_ASKED = ("load_ok", "load_absent", "load_corrupt", "load_failed", "load_timeout")
FAILURES = {
    "load_corrupt": "damaged",
    "load_failed": "load errors",
    "load_timeout": "load timeouts",
    "dump_failed": "dump errors",
    "dump_no_space": "without space",
    "dump_timeout": "dump timeouts",
    "cache_given_up": "never stored",
}


# What several backends say of the same buffer, or the same directories: no sums of those.
_SHARED = ("cache_slots", "posix_used", "posix_capacity", "posix_directories")


@dataclasses.dataclass(frozen=True)
class HitRates:
    """Shares from 0 to 1, None where nothing was asked.

    ``lookup``: of the pages looked up, those found. ``cache``: of the pages loaded or missed,
    those that were in the buffer; None without one. ``files``: of the others, those in files.
    """

    lookup: float | None
    cache: float | None
    files: float | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One backend. ``seconds``: between the two times that ``change`` is the difference of.

    ``change`` is None, and ``seconds`` 0, where there is only one reading of it.
    """

    backend: Backend
    state: State
    age: float
    seconds: float
    change: Counts | None

    def per_second(self, name: str) -> float | None:
        """How fast a counter grows."""
        return None if self.change is None else self.change.get(name, 0) / self.seconds


@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots of buffers by state. ``ready``: neither free, nor dirty, nor being loaded."""

    ready: int
    dirty: int
    loading: int
    free: int


@dataclasses.dataclass(frozen=True)
class Space:
    """Bytes of directories with a limit, and directories that aren't in full use."""

    used: int
    capacity: int
    directories: int
    out: int
    read_only: int
    full: int


@dataclasses.dataclass(frozen=True)
class Total:
    """All rows together; what several backends share is counted once."""

    counters: Counts
    change: Counts
    per_second: Mapping[str, float | None]
    slots: Slots
    space: Space


@dataclasses.dataclass(frozen=True)
class View:
    """What there is at one time. ``gone``: files that processes left behind."""

    time: float
    rows: Sequence[Row]
    gone: Sequence[Backend]
    problems: Sequence[Problem]
    total: Total


class Watch:
    """Reads a directory again and again. Not for use from several threads."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._rows: dict[tuple, Row] = {}
        self._ours: set[tuple] = set()  # whose pid was one of this host's once

    def read(self, now: float) -> View:
        """A reading. ``now``: seconds since 1970. Raises OSError for a directory that isn't there.

        Rates are of the time since a file was read last, or if it hasn't been written since, of
        the time before.
        """
        reading = stats_reader.read(self._directory)
        rows, gone = [], []
        for backend in reading.backends:
            before = self._rows.get(backend.key)
            found = self._state(backend, before, now)
            if found is State.GONE:
                gone.append(backend)
                # Kept for whether it is renewed, which a process of a container shows by.
                self._rows[backend.key] = _row(backend, before, found, now)
                continue
            row = _row(backend, before, found, now)
            self._rows[backend.key] = row
            rows.append(row)
        there = {backend.key for backend in reading.backends}
        self._rows = {key: row for key, row in self._rows.items() if key in there}
        self._ours &= there
        rows.sort(key=lambda row: (row.backend.model, _rank_order(row.backend), row.backend.path))
        shared = _shared_regions(self._directory)
        return View(now, rows, gone, reading.problems, _total(rows, shared))

    def _state(self, backend: Backend, before: Row | None, now: float) -> State:
        found = stats_reader.state(backend, now)
        if found is not State.GONE:
            self._ours.add(backend.key)
            return found
        if backend.key in self._ours or before is None:
            return State.GONE
        if backend.time > before.backend.time or before.state is State.LIVE:
            return State.GONE if stats_reader.is_old(backend, now) else State.LIVE
        return State.GONE


def _row(backend: Backend, before: Row | None, state: State, now: float) -> Row:
    age = max(0.0, now - backend.time)
    if before is None or state is State.SILENT:
        return Row(backend, state, age, 0.0, None)
    seconds = backend.time - before.backend.time
    if seconds <= 0:  # the same file, or a clock that was set back
        return Row(backend, state, age, before.seconds, before.change)
    earlier = before.backend.counters
    change = {name: n - earlier.get(name, 0) for name, n in backend.counters.items()}
    return Row(backend, state, age, seconds, {name: max(0, n) for name, n in change.items()})


def hit_rates(counters: Counts, with_cache: bool) -> HitRates:
    """Of counters since attach, or of what they grew by."""
    get = counters.get
    asked = sum(get(name, 0) for name in _ASKED)
    cached = get("cache_hit", 0) + get("cache_waited", 0) if with_cache else 0
    return HitRates(
        _share(get("lookup_page_hits", 0), get("lookup_pages", 0)),
        _share(cached, asked) if with_cache else None,
        _share(get("load_ok", 0) - cached, asked - cached),
    )


def _share(part: int, whole: int) -> float | None:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None


def has_cache(backend: Backend) -> bool:
    """Whether there is a buffer before the files."""
    return backend.pipeline.startswith("Cache")


def slots(counters: Counts) -> Slots:
    """By state; none where there is no buffer."""
    get = counters.get
    free, dirty = get("cache_slots_free", 0), get("cache_slots_dirty", 0)
    loading = get("cache_slots_loading", 0)
    # They are read one after another while processes use them.
    ready = max(0, get("cache_slots", 0) - free - dirty - loading)
    return Slots(ready, dirty, loading, free)


def space(counters: Counts) -> Space:
    """Of the directories of one backend."""
    get = counters.get
    return Space(
        get("posix_used_bytes", 0),
        get("posix_capacity_bytes", 0),
        get("posix_directories", 0),
        get("posix_directories_out", 0),
        get("posix_directories_read_only", 0),
        get("posix_directories_full", 0),
    )


def queued(counters: Counts) -> tuple[int, int]:
    """Pages of (loads, dumps) that wait or run."""
    return counters.get("load_outstanding", 0), counters.get("dump_outstanding", 0)


def _rank_order(backend: Backend) -> tuple[int, ...]:
    order = ("dp_rank", "pp_rank", "tp_rank", "attn_cp_rank")
    return tuple(backend.ranks.get(name, 0) for name in order)


def _shared_regions(directory: str) -> set[tuple[int, str]]:
    """(uid, first digits of the fingerprint) of the buffers that processes share."""
    found = set()
    for name in os.listdir(directory):
        uid, _, digits = name.removeprefix(_REGION_PREFIX).partition("-")
        if name.startswith(_REGION_PREFIX) and uid.isdigit():
            found.add((int(uid), digits[:16]))
    return found


def _total(rows: Sequence[Row], shared: set[tuple[int, str]]) -> Total:
    change = _sum(row.change for row in rows if row.change is not None)
    names = ("load_bytes", "dump_bytes")
    rates: dict[str, float | None] = {}
    for name in names:
        known = [rate for row in rows if (rate := row.per_second(name)) is not None]
        rates[name] = sum(known) if known else None
    buffers: dict[tuple, Slots] = {}
    places: dict[tuple, Space] = {}
    for row in sorted(rows, key=lambda row: row.backend.time):  # the latest word counts
        backend = row.backend
        digits = backend.identity.rpartition("-")[2]
        own = (backend.uid, digits) if (backend.uid, digits) in shared else backend.key
        buffers[own] = slots(backend.counters)
        places[tuple(sorted(backend.directories))] = space(backend.counters)
    counters = _sum(row.backend.counters for row in rows)
    return Total(
        {name: number for name, number in counters.items() if not name.startswith(_SHARED)},
        change,
        rates,
        Slots(*_columns(buffers.values(), 4)),
        Space(*_columns(places.values(), 6)),
    )


def _columns(parts: Iterable[Slots | Space], count: int) -> list[int]:
    table = [dataclasses.astuple(part) for part in parts]
    return [sum(column) for column in zip(*table, strict=True)] if table else [0] * count


def _sum(counts: Iterable[Counts]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, number in each.items():
            total[name] = total.get(name, 0) + number
    return total
