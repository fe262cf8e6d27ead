"""The Prometheus metrics: their names, and where their values come from.

docs/metrics.md and docs/grafana.json have the same names; a test compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

# Which process and whose pages; with SGLang's names, so that its metrics can be joined.
COMMON_LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank", "attn_cp_rank")

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

_LOOKUP_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_MOVE_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)

Stats = Mapping[str, int]  # `Store.stats`
Read = Callable[[Stats], int]


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric. ``name``: as Prometheus has it. ``labels``: beside `COMMON_LABELS`.

    ``read``: for each value of its one label ("" without), how the value follows from the store's
    counters; empty for what is counted call by call.
    """

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()
    read: Mapping[str, Read] = dataclasses.field(default_factory=dict)
    buckets: tuple[float, ...] = ()


def _sum(*names: str) -> Read:
    return lambda stats: sum(stats.get(name, 0) for name in names)


def _rest(whole: str, *parts: str) -> Read:
    # Counters are read one after another: never less than none.
    taken = _sum(*parts)
    return lambda stats: max(0, stats.get(whole, 0) - taken(stats))


LOOKUP_PAGES = Metric(
    "cachestore_lookup_pages_total",
    COUNTER,
    "Pages that SGLang looked up. hit: can be restored, with all that belongs to them; miss: not "
    "stored, or behind one that isn't.",
    ("result",),
)
LOAD_PAGES = Metric(
    "cachestore_load_pages_total",
    COUNTER,
    "Pages that SGLang asked to load. absent: not stored; failed: stored, but damaged or not "
    "readable; refused: no room in the queue; timeout: not done by timeout_ms.",
    ("pool", "result"),
)
DUMP_PAGES = Metric(
    "cachestore_dump_pages_total",
    COUNTER,
    "Pages that SGLang asked to store. ok: stored now, or before; failed: could not be written; "
    "refused, timeout: as of loads.",
    ("pool", "result"),
)
LOAD_BYTES = Metric(
    "cachestore_load_bytes_total", COUNTER, "Bytes of the pages that were loaded.", ("pool",)
)
DUMP_BYTES = Metric(
    "cachestore_dump_bytes_total",
    COUNTER,
    "Bytes of the pages that SGLang asked to store and that are.",
    ("pool",),
)
LOOKUP_SECONDS = Metric(
    "cachestore_lookup_seconds",
    HISTOGRAM,
    "How long one of SGLang's lookups took.",
    buckets=_LOOKUP_SECONDS,
)
LOAD_SECONDS = Metric(
    "cachestore_load_seconds",
    HISTOGRAM,
    "How long one of SGLang's batches took to load.",
    ("pool",),
    buckets=_MOVE_SECONDS,
)
DUMP_SECONDS = Metric(
    "cachestore_dump_seconds",
    HISTOGRAM,
    "How long one of SGLang's batches took to store; behind a cache, to be in memory.",
    ("pool",),
    buckets=_MOVE_SECONDS,
)
ATTACHED = Metric("cachestore_attached", GAUGE, "1 while the backend is attached, else 0.")

_FROM_STATS = (
    Metric(
        "cachestore_hit_blocks_total",
        COUNTER,
        "Blocks that were loaded, by where they were. cache: in the shared buffer, or just being "
        "read into it for another; storage: read from files.",
        ("tier",),
        {
            "cache": _sum("cache_hit", "cache_waited"),
            "storage": _rest("load_ok", "cache_hit", "cache_waited"),
        },
    ),
    Metric(
        "cachestore_checksum_failures_total",
        COUNTER,
        "Loads of blocks that were damaged, or not what their names say; each is removed.",
        read={"": _sum("load_corrupt")},
    ),
    Metric(
        "cachestore_load_errors_total",
        COUNTER,
        "Loads of blocks that the operating system failed.",
        read={"": _sum("load_failed")},
    ),
    Metric(
        "cachestore_dump_blocks_total",
        COUNTER,
        "Blocks that were to be stored. written: they were, or with a cache they are in memory and "
        "will be; existing: they were before.",
        ("result",),
        {
            "written": _sum("dump_ok"),
            "existing": _sum("dump_existing"),
            "failed": _sum("dump_failed"),
            "no_space": _sum("dump_no_space"),
            "refused": _sum("dump_refused"),
            "timeout": _sum("dump_timeout"),
        },
    ),
    Metric(
        "cachestore_write_behind_blocks_total",
        COUNTER,
        "Blocks in the cache that went to the storage behind SGLang's back. failed: attempts; "
        "given_up: blocks that never went.",
        ("result",),
        {
            "stored": _sum("cache_stored"),
            "failed": _sum("cache_store_failed"),
            "given_up": _sum("cache_given_up"),
        },
    ),
    Metric(
        "cachestore_evicted_blocks_total",
        COUNTER,
        "Blocks that this process evicted from files.",
        read={"": _sum("evicted_blocks")},
    ),
    Metric(
        "cachestore_evicted_bytes_total",
        COUNTER,
        "Bytes of block files that this process evicted.",
        read={"": _sum("evicted_bytes")},
    ),
    Metric(
        "cachestore_unverified_loads_total",
        COUNTER,
        "Loads of blocks whose bytes were not compared with their checksums (setting verify).",
        read={"": _sum("verify_skipped")},
    ),
    Metric(
        "cachestore_staged_pages_total",
        COUNTER,
        "Pages that were copied once more, for want of addresses in their host pool.",
        read={"": _sum("staged_pages")},
    ),
    Metric(
        "cachestore_outstanding_blocks",
        GAUGE,
        "Blocks asked for by SGLang and not done: queued, and being moved.",
        ("direction",),
        {"load": _sum("load_outstanding"), "dump": _sum("dump_outstanding")},
    ),
    Metric(
        "cachestore_copy_queue_blocks",
        GAUGE,
        "Blocks that wait for one of the threads that copy to and from the cache.",
        ("direction",),
        {"load": _sum("cache_load_queued"), "dump": _sum("cache_dump_queued")},
    ),
    Metric(
        "cachestore_stuck_workers",
        GAUGE,
        "Threads in I/O that outlived its request.",
        read={"": _sum("stuck_workers")},
    ),
    Metric(
        "cachestore_cache_slots",
        GAUGE,
        "Slots of the cache by state, of all processes that share it. free: unused; dirty: not in "
        "the storage yet; loading: being read; clean: all others.",
        ("state",),
        {
            "free": _sum("cache_slots_free"),
            "dirty": _sum("cache_slots_dirty"),
            "loading": _sum("cache_slots_loading"),
            "clean": _rest(
                "cache_slots", "cache_slots_free", "cache_slots_dirty", "cache_slots_loading"
            ),
        },
    ),
    Metric(
        "cachestore_used_bytes",
        GAUGE,
        "What block files take in directories that have a limit, those of all models and hosts.",
        read={"": _sum("posix_used_bytes")},
    ),
    Metric(
        "cachestore_capacity_bytes",
        GAUGE,
        "What block files may take in those directories (posix_capacity_gb); 0: no limit.",
        read={"": _sum("posix_capacity_bytes")},
    ),
    Metric(
        "cachestore_directories",
        GAUGE,
        "Storage directories (storage_backends) by what can be done with them: in_use, read_only, "
        "out_of_use.",
        ("state",),
        {
            "in_use": _rest(
                "posix_directories", "posix_directories_out", "posix_directories_read_only"
            ),
            "read_only": _sum("posix_directories_read_only"),
            "out_of_use": _sum("posix_directories_out"),
        },
    ),
    Metric(
        "cachestore_full_directories",
        GAUGE,
        "Storage directories without room for more.",
        read={"": _sum("posix_directories_full")},
    ),
    Metric(
        "cachestore_collecting_directories",
        GAUGE,
        "Storage directories that this process evicts from, for all that use them.",
        read={"": _sum("posix_collecting")},
    ),
)

TABLE = (
    ATTACHED,
    LOOKUP_PAGES,
    LOAD_PAGES,
    DUMP_PAGES,
    LOAD_BYTES,
    DUMP_BYTES,
    LOOKUP_SECONDS,
    LOAD_SECONDS,
    DUMP_SECONDS,
    *_FROM_STATS,
)


def values(kind: str, stats: Stats) -> Iterator[tuple[Metric, tuple[str, ...], int]]:
    """What the store's counters say: metric, the values of its own labels, value."""
    for metric in _FROM_STATS:
        if metric.kind == kind:
            for label, read in metric.read.items():
                yield metric, (label,) if metric.labels else (), read(stats)


def markdown() -> str:
    """All of them for docs/metrics.md."""
    lines = ["| metric | kind | labels | |", "| --- | --- | --- | --- |"]
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(lines) + "\n"
