"""The cases `trace-*`: request traces replayed through each tier, beside plain LRU.

``trace_replay.cc`` does it, with small pages: how often a block is found, not how fast. A capacity
is a share of the trace's distinct blocks. ``posix`` keeps exactly so many after each request;
``posix-watermarks`` lets the directory fill and evicts down to the default low watermark, so that
it holds less than LRU does, and isn't judged.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

from . import compiled, report

VARIABLE = "CACHESTORE_TRACES"
SHARES = (0.02, 0.05, 0.1, 0.2)
TIERS = ("cache", "posix", "posix-watermarks")
_NO_ROOM = 3  # the replay's exit status
_SUFFIX = "_trace.jsonl"
_QUICK_REQUESTS = 300
_ROOT = pathlib.Path(__file__).resolve().parents[1]

HINT = (
    "request traces: none found; give a directory of files named <name>_trace.jsonl, as Mooncake "
    f"published them (a JSON object a line, with hash_ids), by --traces or {VARIABLE}"
)


@dataclasses.dataclass(frozen=True)
class TraceCase:
    """One trace through one tier at one capacity."""

    path: pathlib.Path
    share: float
    tier: str = "cache"

    @property
    def trace(self) -> str:
        """The trace's name."""
        return self.path.name.removesuffix(_SUFFIX)

    @property
    def name(self) -> str:
        """As in ``trace-conversation-2``, ``trace-conversation-posix-2``: percent."""
        tier = "" if self.tier == "cache" else f"{self.tier}-"
        return f"trace-{self.trace}-{tier}{self.share * 100:g}"


def find(
    given: str | None, environ: Mapping[str, str], root: pathlib.Path = _ROOT
) -> list[pathlib.Path]:
    """The traces: in the directory ``given``, else in the variable's, else beside the repository.

    Raises ValueError if a directory that was given has none.
    """
    for source, directory in (("--traces", given), (VARIABLE, environ.get(VARIABLE))):
        if directory:
            found = sorted(pathlib.Path(directory).glob(f"*{_SUFFIX}"))
            if not found:
                raise ValueError(f"{source} {directory}: no file *{_SUFFIX} in it")
            return found
    return sorted(root.parent.glob(f"*/traces/*{_SUFFIX}"))


def cases(paths: Iterable[pathlib.Path]) -> tuple[TraceCase, ...]:
    """Each trace through each of `TIERS` at each of `SHARES`."""
    return tuple(
        TraceCase(path, share, tier) for path in paths for tier in TIERS for share in SHARES
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """Hit rates of one case, of a tier with room for ``slots`` blocks."""

    case: TraceCase
    slots: int
    cachestore: float
    lru: float

    def rows(self) -> list[report.Row]:
        """Of both."""
        return [
            report.row(self.case.name, subject, "hit_rate", [rate])
            for subject, rate in (("cachestore", self.cachestore), ("lru", self.lru))
        ]


def run(
    chosen: Sequence[TraceCase], say: Callable[[str], None], *, quick: bool, shm: str = "/dev/shm"
) -> list[Result]:
    """Replay them, files in ``shm``; says so if they have no room there.

    Raises `CompilerMissing`, or RuntimeError for a trace that can't be read.
    """
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="cachestore-bench-") as directory,
        tempfile.TemporaryDirectory(prefix="cachestore-bench-", dir=shm) as files,
    ):
        say("request traces: compiling the replay (once for each state of the sources)")
        replay = os.path.join(directory, "trace_replay")
        sources = compiled.native_sources("base/*", "cache/*", "host_copy/*", "posix/*", "tier/*")
        compiled.program([compiled.HERE / "trace_replay.cc", *sources], replay)
        for (path, tier), group in itertools.groupby(chosen, lambda case: (case.path, case.tier)):
            of_one = list(group)
            say(f"request traces: {of_one[0].trace}, {tier}" + (", its beginning" if quick else ""))
            read = _beginning(path, directory) if quick else path
            through = tier if tier == "cache" else f"{tier}={files}"
            command = [replay, through, str(read), *(f"{case.share:g}" for case in of_one)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == _NO_ROOM:
                say(f"request traces: {tier}: skipped the rest: {shm}: {done.stderr.strip()}")
            elif done.returncode != 0:
                raise RuntimeError(f"{path.name}: {done.stderr.strip()}")
            # Fewer lines than cases, if there was no room for the rest.
            for case, line in zip(of_one, done.stdout.splitlines(), strict=False):
                said = json.loads(line)
                results.append(Result(case, said["slots"], said["cachestore"], said["lru"]))
    return results


def _beginning(path: pathlib.Path, directory: str) -> pathlib.Path:
    short = pathlib.Path(directory) / path.name
    with open(path) as file:
        short.write_text("".join(itertools.islice(file, _QUICK_REQUESTS)))
    return short


def table(results: Sequence[Result]) -> str:
    """All of them as text, and whether each is as good as LRU."""
    lines = [("trace", "tier", "share", "blocks", "cachestore", "lru", "not below LRU")]
    for each in results:
        lines.append(
            (
                each.case.trace,
                each.case.tier,
                f"{each.case.share:.0%}",
                str(each.slots),
                f"{each.cachestore:.4f}",
                f"{each.lru:.4f}",
                _verdict(each),
            )
        )
    return report.columns(lines, left={0, 1, 6})


def _verdict(result: Result) -> str:
    if result.case.tier == "posix-watermarks":
        return "(holds less)"
    return "met" if result.cachestore >= result.lru else "NOT met"
