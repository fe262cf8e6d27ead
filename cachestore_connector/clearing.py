"""Clearing an identity's blocks as an open store does it, beside stores that have it open.

The mark is made first, so that every store notices; then the blocks disappear at once, and their
space is freed (docs/format.md, "Clearing").
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from . import instances, on_disk

TRASH = "trash"
MARK = "cleared"

_TRIES = 8  # of what another process can undo between two steps
_FULL = (errno.ENOSPC, errno.EDQUOT)


def clear(identity: Path) -> None:
    """Make all blocks disappear; `remove_trash` then frees their space.

    On a full disk the blocks go first where the mark finds no room. Raises OSError.
    """
    if stat.S_ISLNK(os.lstat(identity).st_mode):
        raise OSError(errno.ELOOP, "a symbolic link: what is behind it isn't cleared", identity)
    try:
        _mark(identity)
        _move(identity)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        for block in on_disk.blocks(identity):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(block.path)
        _mark(identity)
        _move(identity)


def _mark(identity: Path) -> None:
    with instances.own(identity) as place:
        made = place / MARK
        os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        _be_later_than(made, identity / MARK)
        os.rename(made, identity / MARK)


def _be_later_than(made: Path, before: Path) -> None:
    """Its time is later than the mark's before it, also in the same tick of the clock."""
    with contextlib.suppress(FileNotFoundError):
        time = os.lstat(before).st_mtime_ns + 1
        if os.lstat(made).st_mtime_ns < time:
            os.utime(made, ns=(time, time))


def _move(identity: Path) -> None:
    blocks = identity / on_disk.BLOCKS
    for _ in range(_TRIES):
        trash = _trash(identity)
        try:
            os.rename(blocks, trash / instances.unique_name())
        except FileNotFoundError:
            if not os.path.lexists(blocks):
                return
        else:
            _sync(identity)
            return
    raise OSError(errno.EBUSY, "its trash is removed again and again", str(identity))


def _trash(identity: Path) -> Path:
    path = identity / TRASH
    if path.is_symlink():  # nothing is moved out of here
        path.unlink()
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _sync(directory: Path) -> None:
    """Only then is a clear sure to outlast a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def trash(identity: Path) -> list[Path]:
    """Cleared blocks on their way out: a directory for each clear."""
    path = identity / TRASH
    try:
        return [] if path.is_symlink() else sorted(path / name for name in os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_trash(identity: Path) -> None:
    """Free the space of cleared blocks. Raises OSError."""
    for path in trash(identity):
        remove_tree(path)


def remove_tree(path: Path | str, tries: int = _TRIES) -> None:
    """Remove a file, or a directory and all below it; links aren't followed.

    What vanishes meanwhile is no error, as others may be removing it too. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        for name in os.listdir(path):
            remove_tree(os.path.join(path, name))
        try:
            os.rmdir(path)
        except OSError as error:
            # A block that was being published when its directory was cleared arrives late.
            if error.errno != errno.ENOTEMPTY or tries == 1:
                raise
            remove_tree(path, tries - 1)
