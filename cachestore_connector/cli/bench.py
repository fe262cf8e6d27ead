"""`cachestore bench`: what this machine's disk and memory give, and when restoring pays."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..mounts import mount_of
from . import bench_break_even as break_even
from . import bench_measure as measuring
from . import bench_picture, bench_scratch, bench_shapes, output, places
from .bench_break_even import Line
from .bench_measure import Measured, Plan, Restored, Row

_MIB = 1 << 20
_LABELS = {
    measuring.DUMP: "dump",
    measuring.DUMP_SYNCED: "dump, synced",
    measuring.LOAD_DISK: "load, from disk",
    measuring.LOAD: "load, page cache",
    measuring.LOOKUP: "lookup",
    measuring.CACHE_DUMP: "cache dump",
    measuring.CACHE_HIT: "cache hit",
}


@output.command()
@places.options
@click.option(
    "--model-shape",
    default="llama-3-8b",
    show_default=True,
    metavar="SHAPE",
    help=f"A model: {', '.join(bench_shapes.PRESETS)}; or {bench_shapes.FORMS}.",
)
@click.option("--page-size", type=click.IntRange(1, 65536), help="Tokens of a page.")
@click.option(
    "--tp",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Ranks that share the KV heads: pages are those of one of them.",
)
@click.option(
    "--layout",
    type=click.Choice(bench_shapes.LAYOUTS),
    default="page_first",
    show_default=True,
    help="SGLang's --hicache-mem-layout.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    help="Measure with 1, 2, 4 ... up to so many at once, as ranks are.  [default: the CPUs, at "
    "most 4]",
)
@click.option(
    "--size",
    type=click.IntRange(1, 1 << 20),
    metavar="MIB",
    help="What all processes together write in a round, about.  [default: 128, or with --quick 16]",
)
@click.option(
    "--prefill-tokens-per-second",
    "prefill",
    type=click.FloatRange(0, 1e9, min_open=True),
    metavar="N",
    help="What the server computes: for the prefix length from which restoring is faster.",
)
@click.option("--plot", metavar="FILE", help="Draw a picture (needs matplotlib).")
@click.option("--quick", is_flag=True, help="A first impression, in seconds.")
def bench(
    out: output.Output,
    stores: tuple[str, ...],
    config_path: str | None,
    model_shape: str,
    page_size: int | None,
    tp: int,
    layout: str,
    processes: int | None,
    size: int | None,
    prefill: float | None,
    plot: str | None,
    quick: bool,
) -> output.Status | None:
    """Measure this machine's disk and memory with the pages of a model; takes under a minute.

    Dumps, loads and looks up pages of that size, by files and by the shared buffer, with the
    server's settings (--config); beside each the raw limit, plain calls of the same bytes. Writes
    into a directory of its own below each --store (without one, below the storage_backends of the
    settings), and removes it at the end.
    """
    shape = bench_shapes.parse(model_shape, page_size=page_size, tp=tp, layout=layout)
    if plot is not None:
        bench_picture.check(plot)
    most = processes or min(4, len(os.sched_getaffinity(0)))
    given = places.load_config(config_path)
    roots = places.either(stores, config_path)
    plan = Plan(
        shape=shape,
        counts=sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)}),
        size=(size or (16 if quick else 128)) * _MIB,
        rounds=2 if quick else 5,
        seconds=5.0 if quick else 35.0,
        given=given,
    )
    skipped = []
    for root in roots:
        _refuse(bench_scratch.lack_of_room(root, plan.file_bytes))
    _refuse(bench_scratch.lack_of_memory(plan.memory_bytes))
    buffers = given.cache_buffer_directory
    if not os.path.isdir(buffers):
        why = f"{buffers} isn't a directory"
    else:
        why = bench_scratch.lack_of_room(buffers, plan.buffer_bytes + (16 << 20))
    if why is not None:
        skipped.append(f"the shared buffer wasn't measured: {why}")
    parents = [*roots, *([] if why is not None else [buffers])]
    with bench_scratch.scratch(parents) as made, _progress(out) as say:
        own = made[: len(roots)]
        measured = measuring.measure(plan, own, None if why is not None else made[-1], say)
        systems = [mount_of(root) for root in own]
        kinds = sorted({"unknown" if each is None else each.kind for each in systems})
    measured.skipped = skipped
    measured.rows = _in_order(measured.rows)
    lines = _lines(measured, prefill, shape.page_size)
    title = _title(plan, roots, kinds)
    _print(out, title, measured, lines, prefill)
    if plot is not None:
        bench_picture.draw(plot, title, measured, _LABELS, lines, prefill)
        out.line(f"picture: {plot}")
    out.result(_described(plan, roots, kinds, measured, lines, prefill, plot))
    return None


def _refuse(why: str | None) -> None:
    if why is not None:
        raise bench_scratch.NoRoomError(why)


@contextlib.contextmanager
def _progress(out: output.Output) -> Iterator[Callable[[str, float], None]]:
    """On a terminal a bar on standard error; else nothing."""
    if not out.progress.is_terminal:
        yield lambda what, part: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out.progress, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, part: bar.update(task, description=what, completed=part)


Lines = Sequence[tuple[Restored, Line, int | None]]


def _lines(measured: Measured, prefill: float | None, page_size: int) -> Lines:
    lines = []
    for restored in measured.restored:
        line = break_even.fitted(restored.points)
        even = None if prefill is None else break_even.tokens(line, prefill, page_size)
        lines.append((restored, line, even))
    return lines


def _title(plan: Plan, roots: Sequence[str], kinds: Sequence[str]) -> str:
    shape = plan.shape
    pages = output.amount(shape.page_bytes)
    tensors = len(shape.tensor_sizes)
    return (
        f"{shape.name}: pages of {shape.page_size} tokens, {pages} in {tensors} "
        f"tensor{'s' if tensors > 1 else ''}; {', '.join(roots)} ({', '.join(kinds)})"
    )


def _print(
    out: output.Output, title: str, measured: Measured, lines: Lines, prefill: float | None
) -> None:
    out.line(title)
    out.line()
    columns = ("", "proc.", "store", "least-most", "plain", "threads", "store/plain", "unit")
    out.table(columns, map(_row, measured.rows), right=",".join(columns[1:-1]))
    out.line()
    out.line("plain: pwritev, preadv and stat of as many files, memcpy for the cache")
    for text in measured.skipped:
        out.line(text)
    out.line()
    computed = f"break-even at {prefill:,.0f}/s" if prefill is not None else "break-even"
    columns = ("a prefix restored from the", "proc.", "start", "then tokens/s", computed)
    out.table(columns, [_prefix_row(*each, prefill) for each in lines], right=",".join(columns[1:]))
    if prefill is None:
        out.line("where fewer tokens/s are computed, long prefixes are worth restoring")
        out.line("(--prefill-tokens-per-second says from which length)")


def _in_order(rows: Sequence[Row]) -> list[Row]:
    order = list(_LABELS)
    return sorted(rows, key=lambda row: (order.index(row.op), row.processes))


def _row(row: Row) -> tuple[str, ...]:
    return (
        _LABELS[row.op],
        str(row.processes),
        f"{statistics.median(row.store):.2f}",
        f"{min(row.store):.2f}-{max(row.store):.2f}",
        f"{statistics.median(row.plain):.2f}",
        str(row.threads),
        f"{100 * row.of_plain:.0f} %",
        row.unit,
    )


def _prefix_row(
    restored: Restored, line: Line, even: int | None, prefill: float | None
) -> tuple[str, ...]:
    if prefill is None:
        length = "-"
    else:
        length = "computing is faster" if even is None else f"{even:,} tokens"
    start, speed = f"{1000 * line.fixed:.2f} ms", f"{line.tokens_per_second:,.0f}"
    return (restored.where, str(restored.processes), start, speed, length)


def _described(
    plan: Plan,
    roots: Sequence[str],
    kinds: Sequence[str],
    measured: Measured,
    lines: Lines,
    prefill: float | None,
    plot: str | None,
) -> dict[str, Any]:
    """What ``--json`` prints."""
    shape = plan.shape
    return {
        "machine": {
            "host": platform.node(),
            "cpus": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "stores": list(roots),
            "filesystems": list(kinds),
        },
        "model": {
            "name": shape.name,
            "layout": shape.layout,
            "page_tokens": shape.page_size,
            "page_bytes": shape.page_bytes,
            "tensors": len(shape.tensor_sizes),
            "bytes_per_token": shape.page_bytes / shape.page_size,
        },
        "rows": [
            {
                "op": row.op,
                "processes": row.processes,
                "unit": row.unit,
                "store": _spread(row.store),
                "plain": _spread(row.plain) | {"threads": row.threads},
                "of_plain": row.of_plain,
            }
            for row in measured.rows
        ],
        "restored": [
            {
                "from": restored.where,
                "processes": restored.processes,
                "points": [{"tokens": n, "seconds": s} for n, s in restored.points],
                "fixed_seconds": line.fixed,
                "tokens_per_second": line.tokens_per_second,
                "prefill_tokens_per_second": prefill,
                "break_even_tokens": even,
            }
            for restored, line, even in lines
        ],
        "skipped": measured.skipped,
        "picture": plot,
    }


def _spread(samples: Sequence[float]) -> dict[str, float | int]:
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "rounds": len(samples),
    }
