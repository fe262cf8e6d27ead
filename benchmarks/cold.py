"""The case `mla-cold-8proc`: eight ranks load the same pages at once, none of them in the cache.

The ranks are processes, each with a store of the same identity on one shared buffer. In a round
fresh pages are stored; then, in changing order: all ranks load them at once, from "go" to the last
one's end; one process reads them from the storage past any cache; and the copy probe copies all of
them as often as there are ranks, with streaming stores and a thread for each CPU. The last two are
what cannot be saved, so their sum is what the ranks' time is compared with. Files are as warm as
writing has left them. Two warm-up rounds come first, in which each rank's bytes are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import copy_limit, report
from .cases import ColdCase
from .cold_rank import Rank
from .compiled import CompilerMissing
from .room import buffer_slots
from .runner import Plan, WrongResult, drop_pages, no_garbage_collection, temporary_directory

READS = "storage_reads_per_page"
RATIO = "wall_over_copies"
_WARM_UPS = 2
_ALIGNMENT = 4096
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# The installed package, and the repository's benchmarks after it.
_START = "import runpy, sys; sys.path.append(sys.argv[1]); " + (
    "runpy.run_module('benchmarks.cold_rank', run_name='__main__')"
)


def run_case(
    case: ColdCase, directory: str, plan: Plan, say: Callable[[str], None]
) -> list[report.Row]:
    """Measure it. ``directory``, on a tmpfs, has the files and the buffers.

    Raises `WrongResult`.
    """
    say(f"{case.name}: {case.pages} pages, {case.payload / 1e6:.0f} MB for each of {case.ranks}")
    others = report.OtherProcesses()
    samples: dict[str, list[float]] = {READS: [], RATIO: [], "ranks": [], "read": [], "copies": []}
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(temporary_directory(directory))
        stored = os.path.join(home, "stored")
        os.makedirs(stored)
        run = _Run(case, home, stored, plan.settings, stack, say)
        stack.enter_context(no_garbage_collection())
        for number in range(_WARM_UPS + plan.rounds):
            label = f"{case.name}/{number}"
            reads, seconds = run.round(label, number, verify=number < _WARM_UPS)
            drop_pages(stored, case)
            if number < _WARM_UPS:
                continue
            samples[READS].append(reads / case.pages)
            for part, spent in seconds.items():
                samples[part].append(spent)
            if "copies" in seconds:
                limit = seconds["read"] + seconds["copies"]
                samples[RATIO].append(seconds["ranks"] / limit)
    parts = {part: statistics.median(samples[part]) for part in seconds}
    told = ", ".join(f"{part} {spent * 1e3:.0f} ms" for part, spent in parts.items())
    say(f"{case.name}: {told}")
    say(f"{case.name}: other processes used {others.share():.0%} of the CPUs")
    return [
        report.row(case.name, "cachestore", op, samples[op]) for op in (READS, RATIO) if samples[op]
    ]


class _Run:
    """What lasts for all rounds: the ranks, the store that fills the storage, the probe."""

    def __init__(
        self,
        case: ColdCase,
        home: str,
        stored: str,
        settings: Mapping[str, Any],
        stack: contextlib.ExitStack,
        say: Callable[[str], None],
    ) -> None:
        self._case = case
        page = case.model.page_bytes
        slot_size = -(-page // _ALIGNMENT) * _ALIGNMENT
        slots = buffer_slots(case.pages)
        common = {"storage_backends": [stored], "timeout_ms": 60000, **settings}
        cached = {
            "share_buffer_enable": True,
            "cache_buffer_directory": home,
            "cache_buffer_capacity_gb": slots * slot_size / 2**30,
            **common,
            "store_pipeline": "Cache|Posix",
        }
        # Reads and writes the storage alone, as one rank of the same identity.
        plain = {**common, "store_pipeline": "Posix"}
        self._files = Rank(plain, 0, case.ranks, page, case.pages)
        stack.callback(self._files.store.close)
        bits = np.random.Generator(np.random.SFC64(seed=11))
        for row in self._files.memory:
            row[:] = np.frombuffer(bits.bytes(page), dtype=np.uint8)
        self._sums = self._files.sums()
        self._probe: copy_limit.CopyProbe | None = None
        tensors = [[row] for row in self._files.memory]
        try:
            self._probe = copy_limit.CopyProbe(
                tensors,
                tensors,
                slots=case.pages,
                slot_size=slot_size,
                threads=len(os.sched_getaffinity(0)),
                directory=home,
            )
            stack.callback(self._probe.close)
        except CompilerMissing as error:
            say(f"{case.name}: no {RATIO}, whose limit needs a compiler: {error}")
        self._ranks: list[_Process] = []
        for rank in range(case.ranks):
            self._ranks.append(_Process(cached, rank, case))
            stack.callback(self._ranks[-1].close)
        for process in self._ranks:
            process.answer()

    def round(self, label: str, number: int, *, verify: bool) -> tuple[int, dict[str, float]]:
        """How often the storage was read, and the seconds of each part."""
        ids = self._files.block_ids(label)
        if (done := self._files.dump(ids)) != self._case.pages:
            raise WrongResult(f"{label}: only {done} of {self._case.pages} pages were stored")
        reads = -self._storage_loads()
        parts: dict[str, Callable[[], float]] = {
            "ranks": lambda: self._load_in_all(label),
            "read": lambda: self._read_once(label, ids),
        }
        if self._probe is not None:
            self._probe.dump(copy_limit.STREAMING)
            parts["copies"] = self._copy_for_all
        names = list(parts)
        shift = number % len(names)
        seconds = {name: parts[name]() for name in names[shift:] + names[:shift]}
        reads += self._storage_loads()
        if reads < self._case.pages:
            raise WrongResult(f"{label}: {reads} reads for {self._case.pages} pages: not cold")
        if verify:
            for rank in self._ranks:
                rank.send("sums")
            if any(rank.answer()["sums"] != self._sums for rank in self._ranks):
                raise WrongResult(f"{label}: loaded pages are wrong")
        return reads, {name: seconds[name] for name in names}

    def _storage_loads(self) -> int:
        for rank in self._ranks:
            rank.send("stats")
        return sum(rank.answer()["storage_loads"] for rank in self._ranks)

    def _load_in_all(self, label: str) -> float:
        for rank in self._ranks:
            rank.send("prepare", label=label)
        for rank in self._ranks:
            rank.answer()
        started = time.perf_counter()  # the same clock in all processes
        for rank in self._ranks:
            rank.send("load")
        answers = [rank.answer() for rank in self._ranks]
        if missing := [a["loaded"] for a in answers if a["loaded"] != self._case.pages]:
            raise WrongResult(f"{label}: a rank got {missing[0]} of {self._case.pages} pages")
        return max(answer["ended"] for answer in answers) - started

    def _read_once(self, label: str, ids: bytes) -> float:
        started = time.perf_counter()
        got = self._files.load(ids)
        seconds = time.perf_counter() - started
        if got != self._case.pages:
            raise WrongResult(f"{label}: {got} of {self._case.pages} pages were read")
        return seconds

    def _copy_for_all(self) -> float:
        assert self._probe is not None
        started = time.perf_counter()
        for _ in range(self._case.ranks):
            self._probe.load(copy_limit.STREAMING)
        return time.perf_counter() - started


class _Process:
    """A rank, being started: its first `answer` says that its store is open."""

    def __init__(self, settings: Mapping[str, Any], tp_rank: int, case: ColdCase) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(
            {
                "settings": dict(settings),
                "tp_rank": tp_rank,
                "tp_size": case.ranks,
                "page_bytes": case.model.page_bytes,
                "pages": case.pages,
            }
        )

    def close(self) -> None:
        """End it; by force, if it doesn't end by itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def send(self, do: str, **more: Any) -> None:
        """One command; `answer` has to follow."""
        self._write({"do": do, **more})

    def answer(self) -> dict[str, Any]:
        """Of the oldest command that has none yet. Raises `WrongResult` if the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WrongResult(f"a rank ended with {self._process.wait()}")
        return json.loads(line)

    def _write(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says that it ended
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
