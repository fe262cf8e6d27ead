"""What a check of `cachestore doctor` says: one line, and what to do about it."""

from __future__ import annotations

import dataclasses
import enum


class Level(str, enum.Enum):
    """How bad it is: FAIL stops a server, or has it work without the store."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """``check``: what was looked at, two words. ``what``: what is so, and why it matters.

    ``do``: what to do about it; empty if nothing needs to be done.
    """

    check: str
    level: Level
    what: str
    do: str = ""


def ok(check: str, what: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, what)


def warn(check: str, what: str, do: str) -> Finding:
    """It works, but not as well as it could, or not for long."""
    return Finding(check, Level.WARN, what, do)


def fail(check: str, what: str, do: str) -> Finding:
    """It doesn't work."""
    return Finding(check, Level.FAIL, what, do)
