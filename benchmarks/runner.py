"""The run: rounds in which the subjects take turns, and what is printed of them.

In a turn a subject dumps the case's pages under fresh keys, looks them up, loads them, and looks
up keys that aren't there; then its files are emptied, so that at no time more than one subject's
pages are stored. The order of the subjects moves on by one from round to round. A warm-up round
comes first; there the loaded pages are compared with the dumped ones. Files are as warm as their
subject's dump has left them: a load reads from the page cache, but for O_DIRECT.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

from . import compiled, raw, report
from .cases import CacheCase, Case, page_keys
from .pools import HostPages
from .python_time import PythonTime
from .subjects import FILE_NAMES, NAMES, Subject, cachestore, sglang_file

OPS = ("dump", "lookup", "load", "lookup" + report.ABSENT)
_LOOKUP_REPEATS = 8

Samples = dict[str, dict[str, dict[str, list[float]]]]  # op -> subject -> variant -> samples


class WrongResult(Exception):
    """A subject didn't do what was asked, or loaded other bytes than it had dumped."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of a case is run. ``settings``: CacheStore's, beside its defaults."""

    subjects: Sequence[str] = NAMES
    rounds: int = 7
    raw_threads: Sequence[int] = raw.THREADS
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    profile: bool = False


def run_case(
    case: Case, directory: str, plan: Plan, say: Callable[[str], None]
) -> list[report.Row]:
    """Measure one case in ``directory``, which is left as it was. Raises `WrongResult`."""
    say(f"{case.name}: {case.payload / 1e6:.0f} MB each way; filling the host pool")
    pages = HostPages(case)
    samples: Samples = {op: collections.defaultdict(dict) for op in OPS}
    cpu: Samples = {op: collections.defaultdict(dict) for op in OPS}
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(temporary_directory(directory))
        subjects = _subjects(case, pages, home, plan, say)
        for subject in subjects:
            stack.callback(subject.close)
        python = stack.enter_context(PythonTime()) if plan.profile else None
        stack.enter_context(one_torch_thread())
        stack.enter_context(no_garbage_collection())
        for number in range(plan.rounds + 1):
            shift = number % len(subjects)
            for subject in subjects[shift:] + subjects[:shift]:
                label = f"{case.name}/{subject.name}/{subject.variant}/{number}"
                if number == 0:
                    _turn(subject, pages, label, case.pages, verify=True)
                    drop_pages(home, case)
                    if python is not None:
                        python.reset()
                    continue
                spent = _turn(subject, pages, label, case.pages, verify=False)
                drop_pages(home, case)
                for op, (figure, on_cpu) in spent.items():
                    figure = figure if op.startswith("lookup") else case.payload / figure / 1e9
                    samples[op][subject.name].setdefault(subject.variant, []).append(figure)
                    cpu[op][subject.name].setdefault(subject.variant, []).append(on_cpu)
            if number == 0:
                say(f"{case.name}: warm-up done, loaded pages are byte-equal")
            else:
                say(f"{case.name}: round {number}/{plan.rounds}  {_latest(samples)}")
        if python is not None:
            say(f"{case.name}: the connector's own time\n{python.table()}")
    say(f"{case.name}: {_cpu_summary(case, samples, cpu)}")
    rows = []
    for op, by_subject in samples.items():
        plain, absent = op.removesuffix(report.ABSENT), op.endswith(report.ABSENT)
        for name, variants in by_subject.items():
            chosen = report.best(variants, plain)
            if chosen and not absent and plain != "lookup":
                say(f"{case.name}: best {name} {op}: {chosen}")
            full = case.name + (report.ABSENT if absent else "")
            rows.append(report.row(full, name, plain, variants[chosen]))
    return sorted(rows, key=lambda r: (r.case, OPS.index(r.op), FILE_NAMES.index(r.subject)))


def _subjects(
    case: Case, pages: HostPages, home: str, plan: Plan, say: Callable[[str], None]
) -> list[Subject]:
    """Each in its own directory below ``home``."""

    def made(name: str) -> str:
        path = os.path.join(home, name)
        os.makedirs(path)
        return path

    subjects: list[Subject] = []
    if "cachestore" in plan.subjects:
        subjects.append(cachestore(case, pages, made("cachestore"), plan.settings))
    if "sglang-file" in plan.subjects and not case.direct:
        subjects.append(sglang_file(case, pages, made("sglang-file")))
    if "raw" in plan.subjects:
        # On tmpfs O_DIRECT means nothing: it has no other place than the page cache.
        try:
            subjects += raw.variants(
                pages,
                made("raw"),
                buffered=not case.direct,
                direct=case.medium == "disk",
                threads=plan.raw_threads,
            )
        except compiled.CompilerMissing as error:
            say(f"{case.name}: raw is skipped: {error}")
    if not subjects:
        raise ValueError(f"{case.name} has none of the subjects {', '.join(plan.subjects)}")
    return subjects


def _turn(
    subject: Subject, pages: HostPages, label: str, count: int, *, verify: bool
) -> dict[str, tuple[float, float]]:
    """What each op took: seconds, or for a lookup, microseconds for each key asked for.

    The second number is seconds on a CPU, of all threads of this process.
    Absent keys come as one batch of SGLang's, of which a subject need look up only the first.
    """
    keys = page_keys(label, count)
    absent = page_keys(label + "/absent", min(count, STORAGE_BATCH_SIZE))
    spent: dict[str, tuple[float, float]] = {}

    def timed(op: str, call: Callable[[Sequence[str]], int], keys: list[str], want: int) -> None:
        is_lookup = call == subject.lookup
        repeats = _LOOKUP_REPEATS if is_lookup else 1
        subject.prepare(keys)
        walls, started_cpu = [], time.process_time()
        for _ in range(repeats):
            started = time.perf_counter()
            got = call(keys)
            walls.append(time.perf_counter() - started)
        on_cpu = (time.process_time() - started_cpu) / repeats
        wall = statistics.median(walls)
        spent[op] = (wall / len(keys) * 1e6 if is_lookup else wall, on_cpu)
        if got != want:
            raise WrongResult(f"{label}: {op} of {len(keys)} pages answered {got}, not {want}")

    timed("dump", subject.dump, keys, count)
    timed("lookup", subject.lookup, keys, count)
    if verify:
        pages.spoil_target()
    timed("load", subject.load, keys, count)
    if verify and (wrong := pages.wrong_pages()):
        raise WrongResult(
            f"{label}: {len(wrong)} of {count} loaded pages are wrong, the first is page {wrong[0]}"
        )
    timed("lookup" + report.ABSENT, subject.lookup, absent, 0)
    return spent


def _latest(samples: Samples) -> str:
    """Dump and load of the round just ended, GB/s; of several variants the best one's."""
    names = dict.fromkeys(name for by_subject in samples.values() for name in by_subject)
    return "  ".join(
        f"{name} "
        + "/".join(f"{max(s[-1] for s in samples[op][name].values()):.2f}" for op in OPS[::2])
        for name in names
    )


def _cpu_summary(case: Case, samples: Samples, cpu: Samples) -> str:
    """CPU time of dumps and loads, which moves less than GB/s where other processes run too."""
    parts = []
    for name in samples["dump"]:
        chosen = {op: report.best(samples[op][name], op) for op in OPS[::2]}
        medians = [statistics.median(cpu[op][name][variant]) for op, variant in chosen.items()]
        parts.append(f"{name} " + "/".join(f"{m / case.payload * 1e12:.0f}" for m in medians))
    return "dump/load, CPU ms per GB: " + "  ".join(parts)


def drop_pages(home: str, case: Case | CacheCase) -> None:
    """Empty the stored pages, whoever's. Directories and small files stay, as in real use.

    The empty files go at the end of the case. An ext4 without a journal won't use a deleted inode
    again for minutes and steps over all of them whenever a file is made, so that each round would
    be slower than the one before.
    """
    for parent, _, names in os.walk(home):
        for name in names:
            path = os.path.join(parent, name)
            if os.lstat(path).st_size >= case.model.page_bytes:
                os.truncate(path, 0)


@contextlib.contextmanager
def temporary_directory(parent: str) -> Iterator[str]:
    """A new directory in ``parent``, removed with what is in it."""
    path = tempfile.mkdtemp(prefix="cachestore-bench-", dir=parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """As SGLang's scheduler process has it on a GPU (model_runner.py, ``load_model``).

    The copies of the generic path are torch's: with more threads they wait for each other on
    cores that others use.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection of what SGLang has imported takes long, and hits whoever's turn it is."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
