"""Verification: all blocks of a store checked in order by several threads, and how far it got."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import instances, on_disk
from .block_check import Checked, Checker, State
from .errors import CacheStoreError

# In the first directory of blocks; a name with a dot is no identity's.
STATE_NAME = ".verify-state"

_TITLE = "cachestore_verify"
_VERSION = 1
_AHEAD = 4  # blocks a thread that are being checked or wait for their turn


class StateError(CacheStoreError, ValueError):
    """A state file that can't be used."""


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """The last block checked: the directory of blocks by its number, the identity, the block."""

    root: int
    identity: str
    block: str


@dataclasses.dataclass
class Tally:
    """What was found so far. ``damaged``, ``unreadable``: path and reason."""

    position: Position | None = None
    blocks: int = 0
    size: int = 0
    unknown: int = 0
    gone: int = 0
    damaged: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unreadable: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def add(self, position: Position, checked: Checked) -> None:
        """Count a block, the next in order."""
        if checked.state is State.DAMAGED:
            self.damaged.append((str(checked.path), checked.problem))
        elif checked.state is State.UNREADABLE:
            self.unreadable.append((str(checked.path), checked.problem))
        self.unknown += checked.state is State.UNKNOWN
        if checked.state is State.GONE:
            self.gone += 1
        else:
            self.blocks += 1
            self.size += checked.size
        self.position = position  # last: what an interruption meets is looked at again

    def covers(self, position: Position) -> bool:
        """Whether a block was checked already."""
        return self.position is not None and position <= self.position


@dataclasses.dataclass(frozen=True)
class Trouble:
    """A directory that couldn't be listed."""

    path: str
    problem: str


def run(
    checker: Checker,
    identities: Sequence[tuple[int, on_disk.StoredIdentity]],
    tally: Tally,
    threads: int,
) -> Iterator[Checked | Trouble]:
    """Check what ``tally`` doesn't cover yet, and count it there, block after block.

    ``identities``: with the number of their directory of blocks, sorted. Memory is bounded: no more
    than a few blocks a thread are ahead of what was yielded. Closing the generator stops the
    threads.
    """
    ahead: collections.deque[tuple[Position, concurrent.futures.Future[Checked]]]
    ahead = collections.deque()

    def next_one() -> Checked:
        position, future = ahead[0]
        checked = future.result()
        ahead.popleft()
        tally.add(position, checked)
        return checked

    pool = concurrent.futures.ThreadPoolExecutor(threads, "verify")
    try:
        for root, identity in identities:
            if tally.covers(Position(root, identity.name, "g")):  # after all hex digits
                continue
            try:
                for block in on_disk.blocks(identity):
                    position = Position(root, identity.name, block.block_id)
                    if tally.covers(position):
                        continue
                    future = pool.submit(checker.check, block.path, identity.manifest)
                    ahead.append((position, future))
                    if len(ahead) >= _AHEAD * threads:
                        yield next_one()
            except OSError as error:
                yield Trouble(str(identity.path), error.strerror or str(error))
        while ahead:
            yield next_one()
    finally:
        checker.stop()
        pool.shutdown(cancel_futures=True)


def save(path: Path, tally: Tally, scope: Sequence[str]) -> None:
    """Write how far a verification got, all or nothing. ``scope``: what it is of.

    Raises OSError.
    """
    state = {_TITLE: _VERSION, "scope": list(scope), **dataclasses.asdict(tally)}
    new = path.with_name(f"{path.name}.{instances.unique_name()}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(state, file, indent=1)
        os.replace(new, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


def load(path: Path, scope: Sequence[str]) -> Tally | None:
    """What `save` wrote; None if there is nothing. Raises StateError for anything else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        tally, its_scope = _tally(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateError(f"{path}: not a state of `cachestore verify`: {error}") from None
    if its_scope != list(scope):
        raise StateError(
            f"{path}: it is of another run, over {', '.join(map(str, its_scope))}: name another "
            "file by --state, or leave --resume out to begin anew"
        )
    return tally


def _tally(state: dict[str, Any]) -> tuple[Tally, list[str]]:
    if state[_TITLE] != _VERSION:
        raise ValueError(f"version {state[_TITLE]}, not {_VERSION}")
    at = state["position"]
    position = None
    if at is not None:
        position = Position(int(at["root"]), str(at["identity"]), str(at["block"]))
    numbers = {name: int(state[name]) for name in ("blocks", "size", "unknown", "gone")}
    lists = {
        name: [(str(path), str(problem)) for path, problem in state[name]]
        for name in ("damaged", "unreadable")
    }
    return Tally(position, **numbers, **lists), list(state["scope"])
