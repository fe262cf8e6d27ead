"""Who has an identity open: `tmp/<instance>/lock`, locked by each store for as long as it lives.

The locks are the kernel's to give back, so nothing is concluded from a name or an age
(docs/format.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

TMP = "tmp"
LOCK = "lock"

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_TRIES = 8
# As on a mount without a lock daemon: nobody has locks there.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def unique_name() -> str:
    """Sixteen hex digits that nobody else has."""
    return secrets.token_hex(8)


def listed(identity: Path) -> list[Path]:
    """The directories of all stores in an identity's `tmp`, those that are gone too."""
    try:
        return sorted(identity / TMP / name for name in os.listdir(identity / TMP))
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_alive(instance: Path) -> bool | None:
    """Whether the store with this directory in `tmp` is open; None if that can't be told."""
    try:
        return is_locked(instance / LOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None


def is_locked(path: Path, first: int = 0, count: int = 0) -> bool:
    """Whether anybody holds a lock in a range of bytes of a file; ``count`` 0: to its end.

    Raises OSError for a file that can't be opened, or where there are no locks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _range(first, count))
    finally:
        os.close(fd)
    return struct.unpack_from("@h", answer)[0] != fcntl.F_UNLCK


def is_open(identity: Path) -> bool | None:
    """Whether any store has an identity open; None if that can't be told."""
    states = [is_alive(instance) for instance in listed(identity)]
    return True if True in states else None if None in states else False


@contextlib.contextmanager
def taken(instance: Path) -> Iterator[bool]:
    """Holds the lock of a store that is gone, which proves that it is: False if it isn't.

    A directory without a lock file was left by a power cut, or is just being made: who makes the
    file has the same proof. Raises FileNotFoundError if the directory is gone.
    """
    fd = os.open(instance / LOCK, os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
    try:
        yield _lock(fd) and _names(instance / LOCK, fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def own(identity: Path) -> Iterator[Path]:
    """A directory in an identity's `tmp` that is ours, as an open store has one; then removed."""
    path = identity / TMP / unique_name()
    for _ in range(_TRIES):  # a cleaner may remove it before it is locked
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        except FileNotFoundError:
            continue
        if not _lock(fd, missing_is_well=True) or not _names(path / LOCK, fd):
            os.close(fd)
            continue
        break
    else:
        raise OSError(errno.EBUSY, "it is removed again and again", str(path))
    try:
        yield path
    finally:
        remove(path)
        os.close(fd)


def remove(instance: Path) -> None:
    """Remove a store's directory in `tmp`, whose lock is held: the lock last."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(instance):
            if name != LOCK:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(instance / name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(instance / LOCK)
        os.rmdir(instance)


def _lock(fd: int, *, missing_is_well: bool = False) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(0, 0))
    except OSError as error:
        return missing_is_well and error.errno in _NO_LOCKS
    return True


def _names(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _range(first: int, count: int) -> bytes:
    """A `struct flock`: type, whence, start, length, pid."""
    return struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
