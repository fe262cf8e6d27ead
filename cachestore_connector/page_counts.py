"""What became of the pages that were asked for, by pool."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

from .errors import Code

LOAD, DUMP = "load", "dump"

# How a page's transfer ended. Absent: it isn't stored. Failed: it is, but its block is damaged or
# its I/O failed. Refused: no room in the queue, or the store is closing; nothing was done. For a
# dump nothing is absent.
RESULTS = {
    LOAD: ("ok", "absent", "failed", "refused", "timeout"),
    DUMP: ("ok", "failed", "refused", "timeout"),
}
_RESULTS = {
    Code.OK: "ok",
    Code.NOT_FOUND: "absent",
    Code.TIMEOUT: "timeout",
    Code.REFUSED: "refused",
    Code.CLOSED: "refused",
}

FIELDS = (
    *(f"{move}_{result}" for move in (LOAD, DUMP) for result in RESULTS[move]),
    "load_bytes",
    "dump_bytes",
)


def results_of(move: str, codes: Sequence[int]) -> dict[str, int]:
    """How many of the pages of a batch ended in which way. ``codes``: one `Code` a page."""
    if codes.count(Code.OK) == len(codes):  # as most are
        return {"ok": len(codes)}
    counts: dict[str, int] = {}
    for code, count in collections.Counter(codes).items():
        result = _RESULTS.get(code, "failed")
        if result not in RESULTS[move]:
            result = "failed"
        counts[result] = counts.get(result, 0) + count
    return counts


class PageCounts:
    """Pages by pool and result, and bytes, since it was made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, dict[str, int]] = {}
        self._lookups = {"lookup_pages": 0, "lookup_page_hits": 0}

    def add_pool(self, name: str) -> None:
        """Have it among the pools, with nothing counted yet."""
        with self._lock:
            self._pool(name)

    def _pool(self, name: str) -> dict[str, int]:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = dict.fromkeys(FIELDS, 0)
        return pool

    def add(
        self, pool: str, move: str, codes: Sequence[int], page_bytes: int
    ) -> tuple[dict[str, int], int]:
        """Count a batch. ``codes``: one `Code` a page. Returns its `results_of` and bytes moved."""
        results = results_of(move, codes)
        size = results.get("ok", 0) * page_bytes
        with self._lock:
            fields = self._pool(pool)
            for result, count in results.items():
                fields[f"{move}_{result}"] += count
            fields[f"{move}_bytes"] += size
        return results, size

    def look(self, pages: int, hits: int) -> None:
        """Count a lookup: of so many pages, the first ``hits`` can be restored."""
        with self._lock:
            self._lookups["lookup_pages"] += pages
            self._lookups["lookup_page_hits"] += hits

    def lookups(self) -> dict[str, int]:
        """A copy: pages looked up, and those of them that can be restored."""
        with self._lock:
            return dict(self._lookups)

    def pools(self) -> dict[str, dict[str, int]]:
        """A copy: for each pool the `FIELDS`."""
        with self._lock:
            return {name: dict(fields) for name, fields in self._pools.items()}
