"""The file in which a server's process says how its store does, for `cachestore top`.

``<directory>/cachestore-stats-<uid>/<pid>-<n>.json``: one JSON object, replaced as a whole. The
directory is the user's alone. Files of processes that were killed are removed by whoever comes
next, once nobody has written them for a while.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .stats_reader import PREFIX, VERSION, started_at

INTERVAL = 1.0  # seconds between two writes
_ABANDONED = 600.0  # seconds without one
_MOST = 1000  # files of one process at a time, or of processes that have the same number


def directory_of(buffer_directory: str, uid: int) -> Path:
    """Where the files of a user are."""
    return Path(buffer_directory) / f"{PREFIX}{uid}"


class StatsFile:
    """One process's file for one store. Not thread-safe, but that `close` may come at any time.

    ``fixed``: what is the same in each writing. ``failed``: told why, when the first of a row of
    writings fails; nothing raises.
    """

    def __init__(
        self, buffer_directory: str, fixed: Mapping[str, Any], failed: Callable[[str], None]
    ) -> None:
        self._directory = directory_of(buffer_directory, os.geteuid())
        self._pid = os.getpid()
        self._failed = failed
        self._fixed = {
            "version": VERSION,
            "pid": self._pid,
            "pid_start": started_at(self._pid),
            "interval": INTERVAL,
            "started": time.time(),
        } | dict(fixed)
        self._name: str | None = None  # once there is a file
        self._failing = False
        self._closed = False

    @property
    def path(self) -> Path | None:
        """Where it is; None before it was first written."""
        return None if self._name is None else self._directory / self._name

    def write(self, changing: Mapping[str, Any]) -> None:
        """Replace the file; it has ``time``, what is fixed, and this."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            text = json.dumps({"time": time.time()} | self._fixed | dict(changing))
            with self._open_directory() as directory:
                self._replace(directory, text.encode())
            self._failing = False
        except (OSError, ValueError, TypeError) as error:
            if not self._failing and not self._closed:
                self._failing = True
                self._failed(f"{self._directory}: {error}")
        if self._closed:  # while this was writing
            self._remove()

    def close(self) -> None:
        """Remove the file, and the directory if it was the last in it. Nothing is written after."""
        if os.getpid() == self._pid:
            self._closed = True
            self._remove()

    def _remove(self) -> None:
        if self._name is not None:
            with contextlib.suppress(OSError):
                (self._directory / self._name).unlink()
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    @contextlib.contextmanager
    def _open_directory(self) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        for attempt in (1, 2):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._directory, 0o700)
            try:
                directory = os.open(self._directory, flags)
                break
            except FileNotFoundError:  # another process was the last in it
                if attempt == 2:
                    raise
        try:
            # Anybody can make one of this name in a shared directory.
            found = os.fstat(directory)
            if found.st_uid != os.geteuid():
                raise PermissionError(f"it belongs to user {found.st_uid}, not {os.geteuid()}")
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.fchmod(directory, 0o700)
            yield directory
        finally:
            os.close(directory)

    def _replace(self, directory: int, content: bytes) -> None:
        temporary = f".{self._pid}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o600, dir_fd=directory), "wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(content)
            if self._name is None:
                self._remove_abandoned(directory)
                self._name = self._take_name(directory, temporary)
            else:
                os.rename(temporary, self._name, src_dir_fd=directory, dst_dir_fd=directory)
                return
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        os.unlink(temporary, dir_fd=directory)

    def _take_name(self, directory: int, temporary: str) -> str:
        # Containers that share the directory can have processes of the same number.
        for n in range(_MOST):
            name = f"{self._pid}-{n}.json"
            with contextlib.suppress(FileExistsError):
                os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
                return name
        raise FileExistsError(f"{_MOST} files of process {self._pid}")

    @staticmethod
    def _remove_abandoned(directory: int) -> None:
        # By age, since a process of another container can't be seen to live.
        oldest = time.time() - _ABANDONED
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime < oldest:
                    os.unlink(name, dir_fd=directory)
