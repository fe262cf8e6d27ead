"""The cases `cache-*`: dump into the cache and load from it, beside the limit of plain copies.

The subjects take turns in one run, as in `runner`: CacheStore with ``Cache|Posix``, and the copy
probe with memcpy and with streaming stores, with as many threads. In a turn of CacheStore fresh
pages are dumped; once what was dumped is in the storage too, they are loaded. The counters say
that no dump was written through and that each load was a hit. The buffer is full from the warm-up
on, so that each dump replaces blocks. Two warm-up rounds come first, for each slot to be mapped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import copy_limit, report
from .cases import CacheCase, page_keys
from .compiled import CompilerMissing
from .pools import HostPages
from .python_time import PythonTime
from .room import buffer_slots
from .runner import (
    Plan,
    WrongResult,
    drop_pages,
    no_garbage_collection,
    one_torch_thread,
    temporary_directory,
)
from .subjects import CACHE_NAMES, Backend, cachestore

OPS = ("dump", "load")
_WARM_UPS = 2
# A turn takes milliseconds: there is time for more of them.
_ROUNDS_FACTOR = 3
_PATIENCE_SECONDS = 60.0
_ALIGNMENT = 4096
_LEAST_CAPACITY = 1 << 20  # as the setting has it

Turn = Callable[[str, bool], dict[str, float]]  # (label, verify) -> seconds by op


def run_case(
    case: CacheCase, directory: str, plan: Plan, say: Callable[[str], None]
) -> list[report.Row]:
    """Measure one case. ``directory``, on a tmpfs, has the files and the buffers.

    Raises `WrongResult`.
    """
    say(f"{case.name}: {case.pages} pages, {case.payload / 1e6:.0f} MB each way")
    pages = HostPages(case)
    others = report.OtherProcesses()
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(temporary_directory(directory))
        turns = _turns(case, pages, home, plan, stack, say)
        samples: dict[str, dict[str, list[float]]] = {name: {} for name in turns}
        python = stack.enter_context(PythonTime()) if plan.profile else None
        stack.enter_context(one_torch_thread())
        stack.enter_context(no_garbage_collection())
        names = list(turns)
        for number in range(_WARM_UPS + _ROUNDS_FACTOR * plan.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if number == _WARM_UPS and python is not None:
                    python.reset()
                spent = turns[name](f"{case.name}/{name}/{number}", number < _WARM_UPS)
                for op, seconds in spent.items():
                    if number >= _WARM_UPS:
                        samples[name].setdefault(op, []).append(case.payload / seconds / 1e9)
        if python is not None:
            say(f"{case.name}: the connector's own time\n{python.table()}")
    for name, by_op in samples.items():
        medians = "/".join(f"{statistics.median(by_op[op]):.2f}" for op in OPS if op in by_op)
        note = " (dump, with the checksum that CacheStore's dump makes)"
        say(f"{case.name}: {name} {medians} GB/s{note if name == copy_limit.CHECKSUMMED else ''}")
    say(f"{case.name}: other processes used {others.share():.0%} of the CPUs")
    return [
        report.row(case.name, name, op, samples[name][op])
        for op in OPS
        for name in CACHE_NAMES
        if name in samples
    ]


def _turns(
    case: CacheCase,
    pages: HostPages,
    home: str,
    plan: Plan,
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> dict[str, Turn]:
    """A subject's turn, by its name; what it holds is given back by ``stack``."""
    slot_size = -(-case.model.page_bytes // _ALIGNMENT) * _ALIGNMENT
    slots = buffer_slots(case.pages)
    settings = _settings(case, slots * slot_size, home, plan.settings)
    turns: dict[str, Turn] = {}
    if "cachestore" in plan.subjects:
        stored = os.path.join(home, "stored")
        os.makedirs(stored)
        backend = cachestore(case, pages, stored, settings)
        stack.callback(backend.close)
        turns["cachestore"] = functools.partial(_cachestore_turn, case, pages, backend, stored)
    if set(plan.subjects) & {copy_limit.MEMCPY, copy_limit.STREAMING}:
        try:
            probe = copy_limit.CopyProbe(
                pages.source_tensors,
                pages.target_tensors,
                slots=slots,
                slot_size=slot_size,
                threads=case.workers,
                directory=home if settings["share_buffer_enable"] else None,
            )
        except CompilerMissing as error:
            say(f"{case.name}: {copy_limit.MEMCPY} and {copy_limit.STREAMING} skipped: {error}")
            return turns
        stack.callback(probe.close)
        for way in (copy_limit.MEMCPY, copy_limit.STREAMING):
            if way in plan.subjects:
                turns[way] = functools.partial(_probe_turn, pages, probe, way)
        if copy_limit.STREAMING in turns:
            turns[copy_limit.CHECKSUMMED] = functools.partial(
                _probe_turn, pages, probe, copy_limit.CHECKSUMMED
            )
    return turns


def _settings(
    case: CacheCase, capacity: int, directory: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    # What the buffer keeps for itself is far less than the slots that `buffer_slots` adds.
    return {
        "store_pipeline": "Cache|Posix",
        "share_buffer_enable": True,
        "cache_buffer_directory": directory,
        "cache_buffer_capacity_gb": max(capacity, _LEAST_CAPACITY) / 2**30,
        "cache_h2h_worker_number": case.workers,
        "cache_dirty_percent": 87,
        **given,
    }


def _cachestore_turn(
    case: CacheCase, pages: HostPages, backend: Backend, stored: str, label: str, verify: bool
) -> dict[str, float]:
    keys = page_keys(label, case.pages)
    counters = backend.storage_backend.counters
    before = counters()

    def timed(move: Callable[[list[str]], int]) -> float:
        started = time.perf_counter()
        got = move(keys)
        seconds = time.perf_counter() - started
        if got != case.pages:
            raise WrongResult(f"{label}: {move.__name__} of {case.pages} pages answered {got}")
        return seconds

    def counted(name: str) -> bool:  # a little after the caller has its answer
        return counters()[name] - before[name] == case.pages

    spent = {"dump": timed(backend.dump)}
    _wait_until(lambda: counted("cache_dumped"), f"{label}: some pages were dumped past the cache")
    _wait_until(lambda: _is_idle(counters()), f"{label}: what was dumped isn't stored")
    if verify:
        pages.spoil_target()
    spent["load"] = timed(backend.load)
    _wait_until(lambda: counted("cache_hit"), f"{label}: some pages weren't in the cache")
    if verify:
        _check(pages, label)
    drop_pages(stored, case)
    return spent


def _is_idle(counters: Mapping[str, int]) -> bool:
    busy = ("cache_slots_dirty", "cache_dump_queued", "cache_dump_running")
    return not any(counters[name] for name in busy)


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise WrongResult(otherwise)
        time.sleep(0.001)


def _probe_turn(
    pages: HostPages, probe: copy_limit.CopyProbe, way: str, label: str, verify: bool
) -> dict[str, float]:
    started = time.perf_counter()
    probe.dump(way)
    spent = {"dump": time.perf_counter() - started}
    if way == copy_limit.CHECKSUMMED:
        return spent  # loads make no checksum
    if verify:
        pages.spoil_target()
    started = time.perf_counter()
    probe.load(way)
    spent["load"] = time.perf_counter() - started
    if verify:
        _check(pages, label)
    return spent


def _check(pages: HostPages, label: str) -> None:
    if wrong := pages.wrong_pages():
        raise WrongResult(f"{label}: {len(wrong)} loaded pages are wrong, the first is {wrong[0]}")
