"""The cases `verify-*`: what checking the checksums adds to a load.

Two stores of the same directory, one with ``verify: always`` and one with ``never``, load the same
pages, which one of them has just dumped, in turns. Each round gives how many times as long, and as
much CPU time, the load that checks takes. Two warm-up rounds come first, in which the loaded pages
are compared. Files are as warm as the dump has left them: but for O_DIRECT in the page cache.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from . import report
from .cases import VerifyCase, page_keys
from .pools import HostPages
from .runner import (
    Plan,
    WrongResult,
    drop_pages,
    no_garbage_collection,
    one_torch_thread,
    temporary_directory,
)
from .subjects import Backend, cachestore

WALL = "wall_over_unchecked"
CPU = "cpu_over_unchecked"
_WARM_UPS = 2
# A turn takes milliseconds, and what is looked for is a few per cent.
_ROUNDS_FACTOR = 9
_WAYS = ("always", "never")


def run_case(
    case: VerifyCase, directory: str, plan: Plan, say: Callable[[str], None]
) -> list[report.Row]:
    """Measure one case in ``directory``, which is left as it was. Raises `WrongResult`."""
    say(f"{case.name}: {case.payload / 1e6:.0f} MB; filling the host pool")
    pages = HostPages(case)
    others = report.OtherProcesses()
    samples: dict[str, list[float]] = {WALL: [], CPU: []}
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(temporary_directory(directory))
        backends = {}
        for way in _WAYS:
            settings: dict[str, Any] = {**plan.settings, "verify": way}
            backends[way] = cachestore(case, pages, home, settings)
            stack.callback(backends[way].close)
        stack.enter_context(one_torch_thread())
        stack.enter_context(no_garbage_collection())
        for number in range(_WARM_UPS + _ROUNDS_FACTOR * plan.rounds):
            keys = page_keys(f"{case.name}/{number}", case.pages)
            if backends["always"].dump(keys) != case.pages:
                raise WrongResult(f"{case.name}: some pages weren't dumped")
            spent = {}
            for way in _WAYS[:: 1 if number % 2 else -1]:
                spent[way] = _load(case, pages, backends[way], keys, compare=number < _WARM_UPS)
            drop_pages(home, case)
            if number < _WARM_UPS:
                continue
            for way, (wall, _) in spent.items():
                rates[way].append(case.payload / wall / 1e9)
            for op, part in ((WALL, 0), (CPU, 1)):
                samples[op].append(spent["always"][part] / spent["never"][part])
        _see_that_they_differ(case, backends)
    told = ", ".join(f"{way} {statistics.median(rate):.2f} GB/s" for way, rate in rates.items())
    say(f"{case.name}: {told}")
    say(f"{case.name}: other processes used {others.share():.0%} of the CPUs")
    return [report.row(case.name, "cachestore", op, samples[op]) for op in samples]


def _load(
    case: VerifyCase, pages: HostPages, backend: Backend, keys: list[str], *, compare: bool
) -> tuple[float, float]:
    """Seconds of a load, and of CPU time in it."""
    if compare:
        pages.spoil_target()
    cpu, wall = time.process_time(), time.perf_counter()
    got = backend.load(keys)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if got != case.pages:
        raise WrongResult(f"{case.name}: a load of {case.pages} pages answered {got}")
    if compare and (wrong := pages.wrong_pages()):
        raise WrongResult(f"{case.name}: {len(wrong)} loaded pages are wrong")
    return wall, cpu


def _see_that_they_differ(case: VerifyCase, backends: dict[str, Backend]) -> None:
    for way, backend in backends.items():
        counters = backend.storage_backend.counters()
        unchecked = 0 if way == "always" else counters["load_ok"]
        if counters["verify_skipped"] != unchecked:
            raise WrongResult(
                f"{case.name}: with verify {way} {counters['verify_skipped']} loads went unchecked"
            )
