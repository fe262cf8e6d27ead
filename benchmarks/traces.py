"""The cases `trace-*`: request traces replayed through the cache tier, beside plain LRU.

``trace_replay.cc`` does it, with pages of a few bytes: how often a block is found in the cache,
not how fast. A capacity is a share of the trace's distinct blocks.
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
_SUFFIX = "_trace.jsonl"
_QUICK_REQUESTS = 300
_ROOT = pathlib.Path(__file__).resolve().parents[1]

HINT = (
    "request traces: none found; give a directory of files named <name>_trace.jsonl, as Mooncake "
    f"published them (a JSON object a line, with hash_ids), by --traces or {VARIABLE}"
)


@dataclasses.dataclass(frozen=True)
class TraceCase:
    """One trace at one capacity."""

    path: pathlib.Path
    share: float

    @property
    def trace(self) -> str:
        """The trace's name."""
        return self.path.name.removesuffix(_SUFFIX)

    @property
    def name(self) -> str:
        """As in ``trace-conversation-2``: percent."""
        return f"trace-{self.trace}-{self.share * 100:g}"


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
    """Each trace at each of `SHARES`."""
    return tuple(TraceCase(path, share) for path in paths for share in SHARES)


@dataclasses.dataclass(frozen=True)
class Result:
    """Hit rates of one case, of a cache with ``slots`` slots."""

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


def run(chosen: Sequence[TraceCase], say: Callable[[str], None], *, quick: bool) -> list[Result]:
    """Replay them. Raises `CompilerMissing`, or RuntimeError for a trace that can't be read."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="cachestore-bench-") as directory:
        say("request traces: compiling the replay (once for each state of the sources)")
        replay = os.path.join(directory, "trace_replay")
        sources = compiled.native_sources("base/*", "cache/*", "host_copy/*", "tier/*")
        compiled.program([compiled.HERE / "trace_replay.cc", *sources], replay)
        for path, group in itertools.groupby(chosen, lambda case: case.path):
            of_one = list(group)
            say(f"request traces: {of_one[0].trace}" + (", its beginning" if quick else ""))
            read = _beginning(path, directory) if quick else path
            command = [replay, str(read), *(f"{case.share:g}" for case in of_one)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{path.name}: {done.stderr.strip()}")
            for case, line in zip(of_one, done.stdout.splitlines(), strict=True):
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
    lines = [("trace", "share", "slots", "cachestore", "lru", "not below LRU")]
    for each in results:
        lines.append(
            (
                each.case.trace,
                f"{each.case.share:.0%}",
                str(each.slots),
                f"{each.cachestore:.4f}",
                f"{each.lru:.4f}",
                "met" if each.cachestore >= each.lru else "NOT met",
            )
        )
    return report.columns(lines, left={0, 5})
