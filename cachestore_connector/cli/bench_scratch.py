"""Where `cachestore bench` writes: directories of its own, which are gone afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence

from ..errors import CacheStoreError
from ..host_memory import available_memory
from . import output

PREFIX = ".cachestore-bench-"
_JUST_MADE = 60.0  # seconds


class NoRoomError(CacheStoreError):
    """What would be written doesn't fit."""


@contextlib.contextmanager
def scratch(parents: Sequence[str]) -> Iterator[list[str]]:
    """A new directory in each, removed with the block, also after Ctrl-C, SIGTERM and SIGHUP.

    What a killed process has left there is removed first.
    Raises OSError for one that isn't there or can't be written. Only for the main thread.
    """
    made: list[str] = []
    held: list[int] = []

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for parent in parents:
            _remove_abandoned(parent)
            made.append(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            held.append(os.open(made[-1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield made
    finally:
        # A second Ctrl-C is no reason to leave half of it behind.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        for directory in held:
            os.close(directory)
        for number, handler in (*before.items(), (signal.SIGINT, interrupt)):
            signal.signal(number, handler)


def _remove_abandoned(parent: str) -> None:
    """Those of this user that nobody holds any more."""
    with os.scandir(parent) as entries:
        left = [entry.path for entry in entries if entry.name.startswith(PREFIX)]
    for path in left:
        with contextlib.suppress(OSError):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                info = os.fstat(directory)
                # One just made may not be held yet.
                if info.st_uid == os.geteuid() and time.time() - info.st_mtime > _JUST_MADE:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(directory)


def lack_of_room(directory: str, needed: int) -> str | None:
    """Why so many bytes don't fit there, if they don't."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free >= needed:
        return None
    return (
        f"{directory} has {output.amount(free)} free, and {output.amount(needed)} are needed: "
        "say a smaller --size"
    )


def lack_of_memory(needed: int) -> str | None:
    """Why so many bytes of memory can't be had, if they can't."""
    free = available_memory()
    if free is None or free >= needed:
        return None
    return (
        f"{output.amount(free)} of memory are free, and {output.amount(needed)} are needed: "
        "say a smaller --size, or fewer --processes"
    )


def files(directories: Sequence[str]) -> list[str]:
    """All files below."""
    return [
        os.path.join(parent, name)
        for directory in directories
        for parent, _, names in os.walk(directory)
        for name in names
    ]


def sync(paths: Sequence[str]) -> None:
    """Have the disk store them."""
    for path in paths:
        with _opened(path) as file:
            os.fsync(file)


def forget(paths: Sequence[str]) -> None:
    """Have the kernel forget what it keeps of them in memory, once they are stored."""
    for path in paths:
        with _opened(path) as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
