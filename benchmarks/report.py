"""From samples to rows, ratios, the table, and ``latest.json``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

GB_PER_S = "GB/s"
US_PER_KEY = "us/key"
ABSENT = "-absent"
_UNITS = {
    "lookup": US_PER_KEY,
    "storage_reads_per_page": "reads/page",
    "wall_over_copies": "ratio",
    "wall_over_unchecked": "ratio",
    "cpu_over_unchecked": "ratio",
    "hit_rate": "hits/block",
}
_PEERS = {"sglang-file": "x file", "raw": "x raw", "memcpy": "x memcpy", "streaming": "x streaming"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of the result: median, min and max over the rounds."""

    case: str
    subject: str
    op: str
    unit: str
    median: float
    min: float
    max: float


@dataclasses.dataclass(frozen=True)
class Expectation:
    """``op`` of ``case`` is at least ``factor`` times as fast as ``peer``'s."""

    case: str
    op: str
    peer: str
    factor: float


@dataclasses.dataclass(frozen=True)
class Bound:
    """``op`` of ``case`` is at most ``most``: in the median, or in every round."""

    case: str
    op: str
    most: float
    always: bool = False


EXPECTATIONS = (
    Expectation("shm-mha-1MiB-128", "dump", "sglang-file", 3.0),
    Expectation("shm-mha-1MiB-128", "load", "sglang-file", 1.5),
    Expectation("shm-mha-1MiB-128", "dump", "raw", 0.8),
    Expectation("shm-mha-1MiB-128", "load", "raw", 0.8),
    *(
        Expectation(case, op, peer, factor)
        for case in ("cache-1MiB-w2", "cache-4.4MiB-w2")
        for op in ("dump", "load")
        for peer, factor in (("streaming", 0.9), ("memcpy", 1.3))
    ),
)
BOUNDS = (
    Bound("mla-cold-8proc", "storage_reads_per_page", 1.0, always=True),
    Bound("mla-cold-8proc", "wall_over_copies", 1.3),
    *(
        Bound(f"verify-{case}", "wall_over_unchecked", 1.1)
        for case in ("shm-mha-1MiB-128", "shm-mla61-64", "disk-mha-1MiB-128")
    ),
    Bound("verify-disk-mha-1MiB-128-direct", "wall_over_unchecked", 1.02),
)


def row(case: str, subject: str, op: str, samples: Sequence[float]) -> Row:
    """The row of ``samples``, which are in the unit of ``op``."""
    return Row(
        case,
        subject,
        op,
        _UNITS.get(op, GB_PER_S),
        *(round(f(samples), 4 if op == "hit_rate" else 3) for f in (statistics.median, min, max)),
    )


def best(variants: Mapping[str, Sequence[float]], op: str) -> str:
    """The name of the fastest of several variants of a subject, by its median."""
    choose = min if op == "lookup" else max
    return choose(variants, key=lambda name: statistics.median(variants[name]))


def ratio(rows: Iterable[Row], case: str, op: str, peer: str) -> float | None:
    """How many times as fast as ``peer`` CacheStore is, by the medians; None if one is missing."""
    found = {row.subject: row for row in rows if (row.case, row.op) == (case, op)}
    if "cachestore" not in found or peer not in found:
        return None
    ours, theirs = found["cachestore"], found[peer]
    if ours.unit == US_PER_KEY:  # less is better
        ours, theirs = theirs, ours
    return ours.median / theirs.median if theirs.median else None


def table(rows: Sequence[Row]) -> str:
    """All rows as text; CacheStore's with how many times as fast as its peers it is."""
    measured = {row.subject for row in rows}
    peers = [peer for peer in _PEERS if peer in measured]
    lines = [
        ("case", "op", "subject", "median", "min", "max", "", *(_PEERS[peer] for peer in peers))
    ]
    for r in rows:
        ratios = [""] * len(peers)
        if r.subject == "cachestore":
            pair = (ratio(rows, r.case, r.op, peer) for peer in peers)
            ratios = ["" if number is None else f"{number:.2f}" for number in pair]
        digits = 2 if r.unit == GB_PER_S or r.median >= 1 else 3
        figures = [f"{number:.{digits}f}" for number in (r.median, r.min, r.max)]
        lines.append((r.case, r.op, r.subject, *figures, r.unit, *ratios))
    return columns(lines, left={0, 1, 2, 6})


def columns(lines: Sequence[Sequence[str]], left: Container[int]) -> str:
    """Aligned, the first line underlined. ``left``: the columns that aren't figures."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    texts.insert(1, "-" * max(len(text) for text in texts))
    return "\n".join(texts)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each of `EXPECTATIONS` and `BOUNDS` that was measured: met or not, by how much."""
    lines = []
    for wanted in EXPECTATIONS:
        number = ratio(rows, wanted.case, wanted.op, wanted.peer)
        if number is not None:
            met = "met" if number >= wanted.factor else "NOT met"
            lines.append(
                f"expected {wanted.case} {wanted.op} >= {wanted.factor} x {wanted.peer}: "
                f"{met} ({number:.2f})"
            )
    for bound in BOUNDS:
        for r in rows:
            if (r.case, r.op) == (bound.case, bound.op):
                number = r.max if bound.always else r.median
                met = "met" if number <= bound.most else "NOT met"
                lines.append(f"expected {r.case} {r.op} <= {bound.most}: {met} ({number:.2f})")
    return lines


def write(path: pathlib.Path, machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write ``{"machine": ..., "rows": [...]}``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}, indent=2
    )
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def describe_machine(directories: Mapping[str, str]) -> dict[str, Any]:
    """What the figures depend on. ``directories``: where the files were, by medium; not told."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "kernel": platform.release(),
        "filesystems": {name: filesystem(path) for name, path in directories.items()},
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("cachestore", "sglang", "torch")},
        },
    }


class OtherProcesses:
    """How much of the machine's CPUs other processes, and other guests, use while this lives."""

    def __init__(self) -> None:
        self._started = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds, of all CPUs: busy, all, and our own with our children's."""
        with open("/proc/stat") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]  # user ... steal
        idle = ticks[3] + ticks[4]
        per_second = os.sysconf("SC_CLK_TCK")
        own = sum(os.times()[:4])
        return (sum(ticks) - idle) / per_second, sum(ticks) / per_second, own

    def share(self) -> float:
        """From 0 to 1."""
        busy, total, own = (
            now - then for now, then in zip(self._now(), self._started, strict=True)
        )
        return min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0


def filesystem(path: str) -> str:
    """The type of the file system that ``path`` is on, such as ``ext4``."""
    wanted = os.path.realpath(path)
    longest, kind = "", "unknown"
    with open("/proc/self/mountinfo") as file:
        for line in file:
            fields, _, source = line.partition(" - ")
            point = fields.split()[4].encode().decode("unicode_escape")
            inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(longest):
                longest, kind = point, source.split()[0]
    return kind


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
