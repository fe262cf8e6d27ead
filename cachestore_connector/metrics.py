"""Prometheus metrics of an attached backend, beside SGLang's own.

They are made with `prometheus_client` as SGLang's are, so that its /metrics page has them, also in
that package's multiprocess mode. One can only add to its counters; so a store's, which begin at 0
with each attach, are followed by their differences, and a metric goes on from one attach to the
next.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from . import metrics_table as table
from .metrics_table import Metric
from .page_counts import DUMP, LOAD, RESULTS

_PAGES = {LOAD: table.LOAD_PAGES, DUMP: table.DUMP_PAGES}
_BYTES = {LOAD: table.LOAD_BYTES, DUMP: table.DUMP_BYTES}
_SECONDS = {LOAD: table.LOAD_SECONDS, DUMP: table.DUMP_SECONDS}


@functools.cache
def _registered() -> dict[str, Any]:
    """The metric objects of this process, by name: a registry takes each name once.

    Made when they are first wanted: in a server `prometheus_client` chooses its way of keeping
    values by an environment variable, which is set by then.
    """
    from prometheus_client import Counter, Gauge, Histogram

    made: dict[str, Any] = {}
    for metric in table.TABLE:
        labels = (*table.COMMON_LABELS, *metric.labels)
        if metric.kind == table.COUNTER:
            made[metric.name] = Counter(metric.name, metric.text, labels)
        elif metric.kind == table.GAUGE:
            # Each process has labels of its own; what one that was replaced said last is over.
            made[metric.name] = Gauge(
                metric.name, metric.text, labels, multiprocess_mode="mostrecent"
            )
        else:
            made[metric.name] = Histogram(metric.name, metric.text, labels, buckets=metric.buckets)
    return made


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Metrics that don't work are said so, once, and are no reason for a page not to be moved."""

    @functools.wraps(method)
    def call(self: Metrics, *args: Any) -> None:
        if self._off or os.getpid() != self._pid:
            return
        try:
            method(self, *args)
        except Exception as error:
            self._off = True
            self._failed(f"no metrics any more: {error!r}")

    return call


class Metrics:
    """The metrics of one attach. Thread-safe; nothing raises, ``failed`` is told why instead.

    ``common``: values of `metrics_table.COMMON_LABELS` at least.
    """

    def __init__(self, common: Mapping[str, Any], failed: Callable[[str], None]) -> None:
        self._pid = os.getpid()
        self._failed = failed
        self._off = False
        self._common = tuple(str(common[name]) for name in table.COMMON_LABELS)
        self._lock = threading.Lock()
        self._followed: dict[tuple[str, tuple[str, ...]], int] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._finished = False
        self._begin()

    @_never_raises
    def _begin(self) -> None:
        for result in ("hit", "miss"):
            self._child(table.LOOKUP_PAGES, result)
        self._child(table.LOOKUP_SECONDS)
        self._child(table.ATTACHED).set(1)
        for metric, labels, _ in table.values(table.COUNTER, {}):
            self._child(metric, *labels)

    @_never_raises
    def add_pool(self, pool: str) -> None:
        """Show what there is of a pool, with zeroes at first."""
        for move in (LOAD, DUMP):
            for result in RESULTS[move]:
                self._child(_PAGES[move], pool, result)
            self._child(_BYTES[move], pool)
            self._child(_SECONDS[move], pool)

    @_never_raises
    def add_pages(
        self, pool: str, move: str, results: Mapping[str, int], size: int, seconds: float
    ) -> None:
        """Count a batch: its pages by result, the bytes that were moved, how long it took."""
        for result, count in results.items():
            self._child(_PAGES[move], pool, result).inc(count)
        if size:
            self._child(_BYTES[move], pool).inc(size)
        self._child(_SECONDS[move], pool).observe(seconds)

    @_never_raises
    def add_lookup(self, pages: int, hits: int, seconds: float) -> None:
        """Note a lookup of so many pages."""
        for result, count in (("hit", hits), ("miss", pages - hits)):
            if count:
                self._child(table.LOOKUP_PAGES, result).inc(count)
        self._child(table.LOOKUP_SECONDS).observe(seconds)

    @_never_raises
    def follow(self, stats: table.Stats) -> None:
        """Bring up what the store's counters say. Not after `finish`."""
        with self._lock:
            if not self._finished:
                self._follow(stats)

    @_never_raises
    def finish(self, stats: table.Stats) -> None:
        """Count to the end what a store that is closed says; nothing is there, and waits, now."""
        with self._lock:
            self._finished = True
            self._follow(stats)
            for metric, labels, _ in table.values(table.GAUGE, {}):
                self._child(metric, *labels).set(0)
            self._child(table.ATTACHED).set(0)

    def _follow(self, stats: table.Stats) -> None:
        for metric, labels, value in table.values(table.COUNTER, stats):
            key = (metric.name, labels)
            more = value - self._followed.get(key, 0)
            if more > 0:
                self._followed[key] = value
                self._child(metric, *labels).inc(more)
        for metric, labels, value in table.values(table.GAUGE, stats):
            self._child(metric, *labels).set(value)

    def _child(self, metric: Metric, *labels: str) -> Any:
        key = (metric.name, labels)
        child = self._children.get(key)
        if child is None:
            child = _registered()[metric.name].labels(*self._common, *labels)
            self._children[key] = child
        return child
