"""`cachestore top`: what the backends attached on this host do, now."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .. import stats_view
from ..stats_reader import Backend, State
from ..stats_view import FAILURES, HitRates, Row, Total, View
from . import output, places

_MODEL_WIDTH = 13
_RANKS = (("dp", "dp_rank", ""), ("tp", "tp_rank", "tp_size"), ("pp", "pp_rank", "pp_size"),
          ("cp", "attn_cp_rank", "attn_cp_size"))  # fmt: skip
_NONE = "-"


@output.command()
@click.option("--once", is_flag=True, help="Print it once, as into a pipe, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two readings.",
)
@click.option(
    "--directory",
    metavar="DIR",
    help="Where the backends write their stats files: their cache_buffer_directory; without it, "
    "that of the settings in force.",
)
def top(
    out: output.Output, once: bool, interval: float, directory: str | None
) -> output.Status | None:
    """Show what the backends attached on this host do, each rank in a line; q ends it.

    Hit rates and bytes per second are of the time between the last two readings. found: pages
    looked up that were there. cache, files: of the pages loaded, those from the shared buffer,
    and of the others those from files. Queues: loads + dumps that wait or run.

    Reads the stats files that backends write about once a second, and asks nothing of a server.
    With --once the status is 1 if a backend has stopped writing its file, or a directory is out
    of use.
    """
    if directory is None:
        directory = places.load_config(None).cache_buffer_directory
    watch = stats_view.Watch(directory)
    if not (out.as_json or once) and out.console.is_terminal:
        _live(out.console, watch, interval, directory)
        return None
    view = _two_readings(watch, interval)
    if not out.as_json:
        for part in _parts(view, directory):
            # A path stays whole; what else is longer than the line is wrapped.
            out.console.print(part, soft_wrap=isinstance(part, Text) and "/" in part)
    out.result(_described(view, directory))
    return _status(view)


def _two_readings(watch: stats_view.Watch, interval: float) -> View:
    """Far enough apart for every backend to have written between them, if it does so at all."""
    first = watch.read(time.time())
    own = [row.backend.interval for row in first.rows if row.state is State.LIVE]
    own += [backend.interval for backend in first.gone]
    time.sleep(max([interval, *(min(1.5 * each, 5.0) for each in own)]))
    return watch.read(time.time())


def _live(console: Console, watch: stats_view.Watch, interval: float, directory: str) -> None:
    """Until q or Ctrl-C."""
    view = watch.read(time.time())
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            heading = _heading(view, f"every {interval:g} s; q ends")
            live.update(Group(heading, *_parts(view, directory)), refresh=True)
            if pressed(interval):
                return
            view = watch.read(time.time())


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """``pressed(seconds)``: waits so long; whether q was pressed meanwhile."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                typed = os.read(terminal, 64)
                if not typed or b"q" in typed.lower():
                    return True
        return False

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _heading(view: View, what: str) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(view.time))
    return Text(f"cachestore top  {socket.gethostname()}  {clock}  {what}", style="bold")


def _parts(view: View, directory: str) -> list[Table | Text]:
    if not view.rows:
        nothing = Text(f"no backend is attached (by the files in {directory})")
        return [nothing, *_notes(view)]
    parts: list[Table | Text] = [_traffic(view), _since_attach(view), Text(), _holdings(view)]
    if any(len(row.backend.pools) > 1 for row in view.rows):
        parts += [Text(), _pools(view)]
    notes = _notes(view)
    return [*parts, Text(), *notes] if notes else parts


def _table(columns: Sequence[str], left: int) -> Table:
    """``left``: how many of the columns are aligned left."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        justify = "left" if number < left else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    return table


def _traffic(view: View) -> Table:
    columns = ("model", "rank", "pid", "found", "cache", "files", "load/s", "dump/s", "queue")
    table = _table(columns, left=2)
    for row in view.rows:
        backend = row.backend
        cached = stats_view.has_cache(backend)
        hits = stats_view.hit_rates(row.change or {}, cached)
        table.add_row(
            _model(backend.model),
            _rank(backend),
            str(backend.pid),
            *_percents(hits),
            *(_rate(row.per_second(name)) for name in ("load_bytes", "dump_bytes")),
            "+".join(map(_short, stats_view.queued(backend.counters))),
            style="dim" if row.state is State.SILENT else "",
        )
    if len(view.rows) > 1:
        total = view.total
        table.add_row(
            "all",
            "",
            "",
            *_percents(_total_hits(view, total.change)),
            *(_rate(total.per_second[name]) for name in ("load_bytes", "dump_bytes")),
            "+".join(map(_short, stats_view.queued(total.counters))),
            style="bold",
        )
    return table


def _since_attach(view: View) -> Text:
    counters = view.total.counters
    hits = zip(("found", "cache", "files"), _percents(_total_hits(view, counters)), strict=True)
    moved = (
        f"{what} {output.amount(counters.get(name, 0))}"
        for what, name in (("loaded", "load_bytes"), ("dumped", "dump_bytes"))
    )
    return Text(f"since attach: {', '.join([*map(' '.join, hits), *moved])}")


def _holdings(view: View) -> Table:
    columns = ("pid", "rank", "ready", "dirty", "loading", "free", "used/capacity", "evicted",
               "dirs", "refused")  # fmt: skip
    table = _table(columns, left=2)
    for row in view.rows:
        backend, counters = row.backend, row.backend.counters
        slots = dataclasses.astuple(stats_view.slots(counters))
        table.add_row(
            str(backend.pid),
            _rank(backend),
            *(_short(n) if stats_view.has_cache(backend) else _NONE for n in slots),
            *_space_and_so_on(stats_view.space(counters), counters),
            style="dim" if row.state is State.SILENT else "",
        )
    if len(view.rows) > 1:
        total = view.total
        table.add_row(
            "all",
            "",
            *map(_short, dataclasses.astuple(total.slots)),
            *_space_and_so_on(total.space, total.counters),
            style="bold",
        )
    return table


def _space_and_so_on(space: stats_view.Space, counters: stats_view.Counts) -> list[str | Text]:
    working = space.directories - space.out
    directories = Text(f"{working}/{space.directories}", style="red" if space.out else "")
    refused = counters.get("load_refused", 0) + counters.get("dump_refused", 0)
    return [
        _of_capacity(space.used, space.capacity),
        _short(counters.get("evicted_blocks", 0)),
        directories,
        Text(_short(refused), style="yellow" if refused else ""),
    ]


def _pools(view: View) -> Table:
    columns = ("pool", "model", "loaded", "absent", "failed", "refused", "dumped", "failed",
               "refused")  # fmt: skip
    table = _table(columns, left=2)
    pools: dict[tuple[str, str], dict[str, int]] = {}
    for row in view.rows:
        for name, counts in row.backend.pools.items():
            known = pools.setdefault((row.backend.model, name), {})
            for what, number in counts.items():
                known[what] = known.get(what, 0) + number
    for (model, name), counts in pools.items():
        get = counts.get
        figures = [
            get("load_ok", 0),
            get("load_absent", 0),
            get("load_failed", 0) + get("load_timeout", 0),
            get("load_refused", 0),
            get("dump_ok", 0),
            get("dump_failed", 0) + get("dump_timeout", 0),
            get("dump_refused", 0),
        ]
        table.add_row(name[:16], _model(model), *map(_short, figures))
    return table


def _notes(view: View) -> list[Text]:
    """What wants attention, a line each."""
    notes = []
    failures = [
        f"{view.total.counters[name]:,} {what}"
        for name, what in FAILURES.items()
        if view.total.counters.get(name)
    ]
    if failures:
        notes.append(Text(f"pages since attach: {', '.join(failures)}", style="yellow"))
    for row in view.rows:
        if row.state is State.SILENT:
            text = f"pid {row.backend.pid} ({_rank(row.backend)}): silent for {row.age:.0f} s"
            notes.append(Text(text, style="red"))
    space = view.total.space
    for count, what in (
        (space.out, "out of use"),
        (space.read_only, "only read from"),
        (space.full, "full"),
    ):
        if count:
            notes.append(Text(f"directories {what}: {count} (the server's log says why)", "red"))
    if view.gone:
        pids = ", ".join(str(backend.pid) for backend in view.gone[:5])
        more = ", ..." if len(view.gone) > 5 else ""
        notes.append(Text(f"left out: files of processes that are gone, pid {pids}{more}", "dim"))
    notes += [Text(f"{problem.path}: {problem.why}", "dim") for problem in view.problems]
    return notes


def _status(view: View) -> output.Status:
    silent = any(row.state is State.SILENT for row in view.rows)
    return output.Status.FOUND if silent or view.total.space.out else output.Status.OK


def _total_hits(view: View, counters: stats_view.Counts) -> HitRates:
    return stats_view.hit_rates(counters, any(stats_view.has_cache(r.backend) for r in view.rows))


def _described(view: View, directory: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "time": view.time,
        "host": socket.gethostname(),
        "directory": directory,
        "backends": [_described_row(row) for row in view.rows],
        "total": _described_total(view, view.total),
        "gone": [{"file": b.path, "pid": b.pid, "uid": b.uid} for b in view.gone],
        "problems": [dataclasses.asdict(problem) for problem in view.problems],
    }


def _described_row(row: Row) -> dict[str, Any]:
    backend = row.backend
    cached = stats_view.has_cache(backend)
    rates = {name: row.per_second(name) for name in ("load_bytes", "dump_bytes")}
    return {
        "file": backend.path,
        "pid": backend.pid,
        "uid": backend.uid,
        "state": row.state.value,
        "age": row.age,
        "attached": backend.started,
        "model": backend.model,
        "identity": backend.identity,
        "pipeline": backend.pipeline,
        "directories": list(backend.directories),
        "ranks": dict(backend.ranks),
        "seconds": row.seconds,
        "hit_rates": _described_hits(
            stats_view.hit_rates(row.change or {}, cached),
            stats_view.hit_rates(backend.counters, cached),
        ),
        "per_second": rates,
        "queued": dict(zip(("load", "dump"), stats_view.queued(backend.counters), strict=True)),
        "slots": dataclasses.asdict(stats_view.slots(backend.counters)),
        "space": dataclasses.asdict(stats_view.space(backend.counters)),
        "counters": dict(backend.counters),
        "pools": {name: dict(counts) for name, counts in backend.pools.items()},
    }


def _described_total(view: View, total: Total) -> dict[str, Any]:
    now, attached = (_total_hits(view, counters) for counters in (total.change, total.counters))
    return {
        "hit_rates": _described_hits(now, attached),
        "per_second": dict(total.per_second),
        "queued": dict(zip(("load", "dump"), stats_view.queued(total.counters), strict=True)),
        "slots": dataclasses.asdict(total.slots),
        "space": dataclasses.asdict(total.space),
        "counters": dict(total.counters),
    }


def _described_hits(now: HitRates, attached: HitRates) -> dict[str, Any]:
    return {"now": dataclasses.asdict(now), "since_attach": dataclasses.asdict(attached)}


def _model(name: str) -> str:
    """The last part of a path, cut to its column."""
    last = name.rstrip("/").rpartition("/")[2] or "?"
    return last if len(last) <= _MODEL_WIDTH else last[: _MODEL_WIDTH - 1] + "~"


def _rank(backend: Backend) -> str:
    """Those that tell it from other ranks: ``tp1`` or ``dp0 tp1``."""
    words = []
    for word, rank, size in _RANKS:
        number = backend.ranks.get(rank)
        if number is not None and (backend.ranks.get(size, 1) > 1 or (not size and number)):
            words.append(f"{word}{number}")
    return " ".join(words) or _NONE


def _percents(hits: HitRates) -> list[str]:
    return [_NONE if n is None else f"{100 * n:.0f} %" for n in dataclasses.astuple(hits)]


def _rate(rate: float | None) -> str:
    return _NONE if rate is None else output.amount(rate)


def _of_capacity(used: int, capacity: int) -> str:
    """``0.3/1.0 TiB``: in the unit of the capacity."""
    if not capacity:
        return "no limit"
    number, unit = output.amount(capacity).split(" ")
    power = ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    return f"{used / 1024**power:.1f}/{number} {unit}"


def _short(number: int) -> str:
    """At most five characters: ``9999``, ``12.3k``, ``4.5M``."""
    if number < 10_000:
        return str(number)
    for unit in "kMGT":
        number /= 1000
        if number < 1000:
            return f"{number:.3g}{unit}" if number < 999.5 else f"{number:.0f}{unit}"
    return f"{number:.0f}T"
