"""The files in which attached backends say what they count, as others may read them.

``<cache_buffer_directory>/cachestore-stats-<uid>/<pid>-<n>.json``, one for each backend, written
anew about once a second and removed at detach. Nothing in them is taken on trust: they may be
another user's. Nothing here waits for a server or needs more of it than these files.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

VERSION = 1
PREFIX = "cachestore-stats-"

# A backend that hasn't written for so many of its intervals is taken for silent.
PATIENCE = 10

_MAX_BYTES = 1 << 20
_MAX_TEXT = 500
_MAX_COUNT = 2**64 - 1
_INTERVALS = 0.01, 3600.0
_NAME = re.compile(r"[0-9]{1,10}-[0-9]{1,10}\.json")


class State(enum.Enum):
    """What is known of the process behind a file."""

    LIVE = "live"
    SILENT = "silent"  # it is there, and hasn't written for long
    GONE = "gone"  # there is no such process: a file left behind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What one file says. ``time``, ``started``: seconds since 1970. ``uid``: its owner.

    ``counters``: by the names of cs_stats (c_api.h). ``pools``: counts of pages and bytes, by pool.
    ``ranks``: ``tp_rank``, ``tp_size`` and so on. Text has no control characters.
    """

    path: str
    uid: int
    pid: int
    pid_start: int
    time: float
    interval: float
    started: float
    model: str
    pipeline: str
    identity: str
    directories: tuple[str, ...]
    ranks: Mapping[str, int]
    counters: Mapping[str, int]
    pools: Mapping[str, Mapping[str, int]]

    @property
    def key(self) -> tuple[str, int, float]:
        """The same for all files that one attached backend writes."""
        return self.path, self.pid_start, self.started


@dataclasses.dataclass(frozen=True)
class Problem:
    """What couldn't be read, and why."""

    path: str
    why: str


@dataclasses.dataclass(frozen=True)
class Reading:
    """All files at one time."""

    backends: tuple[Backend, ...]
    problems: tuple[Problem, ...]


def read(directory: str) -> Reading:
    """The files below ``directory``, of every user who lets them be read.

    What vanishes meanwhile is passed by. Raises OSError if ``directory`` can't be listed.
    """
    backends: list[Backend] = []
    problems: list[Problem] = []
    for name in sorted(os.listdir(directory)):
        uid = name.removeprefix(PREFIX)
        if name == uid or not re.fullmatch("[0-9]{1,10}", uid):
            continue
        path = os.path.join(directory, name)
        try:
            _read_user(path, int(uid), backends, problems)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(Problem(path, error.strerror or str(error)))
    return Reading(tuple(backends), tuple(problems))


def _read_user(path: str, uid: int, backends: list[Backend], problems: list[Problem]) -> None:
    # By its descriptor, so that what is listed is what was looked at.
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_uid != uid:
            problems.append(Problem(path, f"isn't user {uid}'s, as its name says: not read"))
            return
        for name in sorted(filter(_NAME.fullmatch, os.listdir(opened))):
            whole = os.path.join(path, name)
            try:
                backends.append(_parsed(_content(opened, name, uid), whole, uid))
            except FileNotFoundError:
                continue
            except OSError as error:
                problems.append(Problem(whole, error.strerror or str(error)))
            except (ValueError, RecursionError) as error:
                problems.append(Problem(whole, f"isn't a stats file: {_clean(str(error))}"))
    finally:
        os.close(opened)


def _content(directory: int, name: str, uid: int) -> bytes:
    # O_NONBLOCK: a pipe of that name doesn't hold us up.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    opened = os.open(name, flags, dir_fd=directory)
    with os.fdopen(opened, "rb") as file:
        info = os.fstat(opened)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != uid:
            raise ValueError(f"not a plain file of user {uid}")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return content


def _parsed(content: bytes, path: str, uid: int) -> Backend:
    """Raises ValueError."""
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    if fields.get("version") != VERSION:
        raise ValueError(f"version {fields.get('version')!r}, not {VERSION}")
    directories = fields.get("directories", [])
    if not isinstance(directories, list):
        raise ValueError("directories: not a list")
    least, most = _INTERVALS
    pools = _object(fields, "pools")
    return Backend(
        path=path,
        uid=uid,
        pid=_count(fields, "pid"),
        pid_start=_counts({"start": fields.get("pid_start")}).get("start", 0),
        time=_number(fields, "time"),
        interval=min(most, max(least, _number(fields, "interval"))),
        started=_number(fields, "started"),
        model=_text(fields, "model"),
        pipeline=_text(fields, "pipeline"),
        identity=_text(fields, "identity"),
        directories=tuple(_clean(str(each)) for each in directories),
        ranks=_counts(_object(fields, "ranks")),
        counters=_counts(_object(fields, "counters")),
        pools={_clean(name): _counts(_object(pools, name)) for name in pools},
    )


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ValueError(f"{name}: not an object")
    return value


def _counts(fields: Mapping[str, Any]) -> dict[str, int]:
    """Those that are known to be something; a rank that doesn't apply is null."""
    return {_clean(name): _count(fields, name) for name, each in fields.items() if each is not None}


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name}: not a count")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if type(value) not in (int, float) or not -1e18 < value < 1e18:
        raise ValueError(f"{name}: not a number")
    return float(value)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name}: not text")
    return _clean(value or "")


def _clean(text: str) -> str:
    """Nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_TEXT])


def state(backend: Backend, now: float) -> State:
    """What is known of the process, by its pid and by when the file was written.

    A process of another pid namespace (a container's) is taken for gone, since its pid isn't ours:
    whoever sees the file renewed knows better. ``now``: seconds since 1970.
    """
    if started_at(backend.pid) != backend.pid_start:
        return State.GONE
    return State.SILENT if is_old(backend, now) else State.LIVE


def is_old(backend: Backend, now: float) -> bool:
    """Whether the file hasn't been written for `PATIENCE` of its intervals."""
    return now - backend.time > PATIENCE * backend.interval


def started_at(pid: int) -> int | None:
    """When a process was started, in ticks since boot (field 22 of its stat); None for none.

    One that has ended and that nobody has waited for is none.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The second field, a name in brackets, may have anything in it.
    fields = text[text.rfind(b")") + 1 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
