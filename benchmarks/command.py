"""The command line: which cases, by which subjects, and where the result goes."""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from . import async_load, cache_copies, cold, raw, report, room, runner, traces, verification
from .cases import (
    CACHE_CASES,
    CASES,
    COLD_CASES,
    VERIFY_CASES,
    CacheCase,
    Case,
    ColdCase,
    VerifyCase,
    select,
)
from .compiled import CompilerMissing
from .runner import Plan, WrongResult
from .subjects import CACHE_NAMES, FILE_NAMES, NAMES

_CASES = (*CASES, *VERIFY_CASES, *CACHE_CASES, *COLD_CASES, *async_load.CASES)
_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="CacheStore side by side with SGLang's file backend, the raw limits of files\n"
        "and of copies, and plain LRU.",
        epilog=textwrap.fill(
            "Cases: "
            + ", ".join(case.name for case in _CASES)
            + "; trace-<name>-<percent> and trace-<name>-posix-<percent> for each request trace.",
            break_on_hyphens=False,
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="few pages, 2 rounds, no verdicts: does it work?"
    )
    parser.add_argument("--case", action="append", default=[], help="name or glob; repeatable")
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds after the warm-up; cases of copies, which are short, have three times as "
        "many (default: 7)",
    )
    parser.add_argument(
        "--subjects",
        default=",".join((*NAMES, *async_load.SUBJECTS)),
        help=f"{', '.join(FILE_NAMES)} of files; {', '.join(CACHE_NAMES)} of copies; "
        f"{', '.join(async_load.SUBJECTS)} of load-backs; cachestore, lru of traces (default: all)",
    )
    parser.add_argument("--disk-dir", help="for the disk cases (default: $TMPDIR, else build/)")
    parser.add_argument(
        "--shm-dir", default="/dev/shm", help="a tmpfs, for all other cases (default: %(default)s)"
    )
    parser.add_argument(
        "--traces",
        metavar="DIR",
        help=f"where the *_trace.jsonl are (default: ${traces.VARIABLE}, else any directory "
        "named traces in one beside the repository)",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=_ROOT / "benchmarks" / "results" / "latest.json",
        help="default: benchmarks/results/latest.json",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of CacheStore's, to try it; repeatable",
    )
    parser.add_argument(
        "--profile-python",
        action="store_true",
        help="CacheStore alone, and where its time in Python goes; writes no result",
    )
    options = parser.parse_args(arguments)
    options.subjects = options.subjects.split(",")
    names = (*NAMES, *async_load.SUBJECTS)
    if unknown := set(options.subjects) - set(names):
        parser.error(f"no such subject: {', '.join(sorted(unknown))}; {', '.join(names)}")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        found = traces.find(options.traces, os.environ)
        options.no_traces = not found
        options.cases = select(options.case, (*_CASES, *traces.cases(found)))
        options.settings = dict(_setting(text) for text in options.set)
    except ValueError as error:
        parser.error(str(error))
    return options


def _setting(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--set {text}: not of the form key=value")
    return key, yaml.safe_load(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. 1 if a subject gave a wrong result; slowness is no failure."""
    options = _parse(arguments)
    logging.disable(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that directories are removed
    plan = Plan(
        subjects=["cachestore"] if options.profile_python else options.subjects,
        rounds=options.rounds or (2 if options.quick else 7),
        raw_threads=(2,) if options.quick else raw.THREADS,
        settings=options.settings,
        profile=options.profile_python,
    )
    disk = options.disk_dir or os.environ.get("TMPDIR") or str(_ROOT / "build")
    if not options.disk_dir:
        os.makedirs(disk, exist_ok=True)
    directories = {"shm": options.shm_dir, "disk": disk}
    kinds = {medium: report.filesystem(path) for medium, path in directories.items()}
    _say("file systems: " + ", ".join(f"{medium} on {kind}" for medium, kind in kinds.items()))
    rows: list[report.Row] = []
    others = report.OtherProcesses()
    try:
        for case in options.cases:
            if not isinstance(case, traces.TraceCase):
                rows += _measure(case.quick() if options.quick else case, directories, plan)
        if rows:
            print("\n" + report.table(rows) + "\n", flush=True)
        results = _replay(options, plan)
        rows += [row for result in results for row in result.rows() if row.subject in plan.subjects]
    except WrongResult as error:
        _say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        _say("stopped; what was stored is removed")
        return 130
    if options.quick:
        _say("quick: few pages, of which no expectation is judged")
    else:
        for line in report.verdicts(rows):
            print(line)
    busy = others.share()
    if busy > 0.1:
        _say(f"other processes used {busy:.0%} of the CPUs meanwhile: figures are low and vary")
    if not plan.profile:
        machine = report.describe_machine(directories)
        machine |= {"rounds": plan.rounds, "cpu_share_of_others": round(busy, 2)}
        report.write(options.out, machine, rows)
        _say(f"written: {options.out.name}")
    return 0


def _measure(
    case: Case | CacheCase | ColdCase | async_load.AsyncLoadCase,
    directories: Mapping[str, str],
    plan: Plan,
) -> list[report.Row]:
    """The rows of a case; none, and why, if it can't be run or isn't asked for."""
    if isinstance(case, async_load.AsyncLoadCase):
        if plan.profile or not set(plan.subjects) & set(async_load.SUBJECTS):
            return []
        return async_load.run_case(case, plan, _say)
    wanted = FILE_NAMES if isinstance(case, Case) else CACHE_NAMES
    if isinstance(case, ColdCase | VerifyCase):
        wanted = ("cachestore",)
    elif isinstance(case, Case) and case.direct:
        wanted = tuple(name for name in wanted if name != "sglang-file")  # it has no O_DIRECT
    if plan.profile and isinstance(case, ColdCase | VerifyCase):
        _say(f"{case.name}: skipped: it has no profile")
        return []
    if not set(plan.subjects) & set(wanted):
        _say(f"{case.name}: skipped: it has {', '.join(wanted)}")
        return []
    if isinstance(case, Case):
        directory = directories[case.medium]
        if lack := room.lack(case, directory):
            _say(f"{case.name}: skipped: {lack}")
            return []
        run_files = verification if isinstance(case, VerifyCase) else runner
        return run_files.run_case(case, directory, plan, _say)
    directory = directories["shm"]
    fitting, lack = room.fitted(case, directory)
    if fitting is None:
        _say(f"{case.name}: skipped: {lack}")
        return []
    if lack:
        _say(f"{case.name}: fewer pages: {lack}")
    run_case = cache_copies.run_case if isinstance(case, CacheCase) else cold.run_case
    return run_case(fitting, directory, plan, _say)


def _replay(options: argparse.Namespace, plan: Plan) -> list[traces.Result]:
    chosen = [case for case in options.cases if isinstance(case, traces.TraceCase)]
    if plan.profile or not set(plan.subjects) & {"cachestore", "lru"}:
        return []
    if options.no_traces and not options.case:
        _say(traces.HINT)
    if not chosen:
        return []
    try:
        results = traces.run(chosen, _say, quick=options.quick, shm=options.shm_dir)
    except CompilerMissing as error:
        _say(f"request traces: skipped: {error}")
        return []
    print("\n" + traces.table(results) + "\n", flush=True)
    return results


def _say(text: str) -> None:
    print(f"[bench] {text}", flush=True)
