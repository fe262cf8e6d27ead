"""What files and directories take of a disk."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

_SECTOR = 512  # of st_blocks, whatever the filesystem's


@dataclasses.dataclass(frozen=True)
class Usage:
    """``size``: bytes that the files have; ``allocated``: bytes that they take, directories too."""

    files: int = 0
    directories: int = 0
    size: int = 0
    allocated: int = 0

    @property
    def inodes(self) -> int:
        """Of both kinds."""
        return self.files + self.directories

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(_numbers(self), _numbers(other), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(a - b for a, b in zip(_numbers(self), _numbers(other), strict=True)))


def _numbers(usage: Usage) -> tuple[int, ...]:
    return dataclasses.astuple(usage)


def of(path: str | Path) -> Usage:
    """Of a file, or of a directory and all below it; links aren't followed.

    What is gone takes nothing. Raises OSError for a directory that can't be listed.
    """
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return Usage()
    if not os.path.isdir(path) or os.path.islink(path):
        return Usage(1, 0, info.st_size, info.st_blocks * _SECTOR)
    files, directories, size, allocated = 0, 1, 0, info.st_blocks * _SECTOR
    below = [os.fspath(path)]
    while below:
        try:
            entries = os.scandir(below.pop())
        except (FileNotFoundError, NotADirectoryError):
            continue
        with entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                allocated += info.st_blocks * _SECTOR
                if entry.is_dir(follow_symlinks=False):
                    directories += 1
                    below.append(entry.path)
                else:
                    files += 1
                    size += info.st_size
    return Usage(files, directories, size, allocated)


@dataclasses.dataclass(frozen=True)
class Space:
    """Of a filesystem, in bytes and in inodes. ``free``: to this user."""

    size: int
    free: int
    inodes: int
    inodes_free: int


def space(path: str | Path) -> Space:
    """Of the filesystem that ``path`` lies on. Raises OSError."""
    info = os.statvfs(path)
    return Space(
        size=info.f_blocks * info.f_frsize,
        free=info.f_bavail * info.f_frsize,
        inodes=info.f_files,
        inodes_free=info.f_favail,
    )
