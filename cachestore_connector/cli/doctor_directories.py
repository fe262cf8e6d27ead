"""`cachestore doctor`: the directories of blocks.

Nothing is made but a small file, for a moment, to see whether one can be written. A directory that
isn't there yet is judged by its nearest ancestor.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
import threading
from collections.abc import Callable

from .. import config as settings
from ..mounts import Mount, mount_of, nearest
from . import doctor_space
from .doctor_finding import Finding, fail, ok, warn
from .doctor_left_over import in_directory

PATIENCE = 15.0  # seconds for all that is looked at in one directory


def checks(config: settings.Config, patience: float = PATIENCE) -> list[Finding]:
    """All of them, for each directory; one that doesn't answer is given up."""
    found = same(config.storage_backends)
    for index, path in enumerate(config.storage_backends):
        found += _within(patience, path, lambda i=index, p=path: _one(config, i, p))
    found += doctor_space.shared_disks(config)
    return found


def _within(patience: float, path: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    found: list[Finding] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.extend(look())
        except Exception as error:  # said below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    if thread.is_alive():
        return [
            fail(
                "directory",
                f"{path}: no answer within {patience:g} s; requests there would wait for "
                "timeout_ms and then be misses",
                "see to the mount (its server, the network), or take it out of storage_backends",
            )
        ]
    if errors and not isinstance(errors[0], OSError):
        raise errors[0]
    if errors:
        found.append(fail("directory", f"{path}: {errors[0]}", "see to it, and run this again"))
    return found


def _one(config: settings.Config, index: int, path: str) -> list[Finding]:
    place = usable(path)
    if place.level != "OK":
        return [place]
    mount = mount_of(nearest(path))
    return [
        place,
        *protection(path),
        file_system(path, mount, config.posix_zero_copy),
        direct_io(path, config.io_direct),
        *doctor_space.checks(config, index, path, nearest(path)),
        *in_directory(path),
    ]


def same(paths: tuple[str, ...]) -> list[Finding]:
    """Whether one directory is given twice, by a link or a bind mount."""
    seen: dict[tuple[int, int], str] = {}
    found = []
    for path in paths:
        try:
            info = os.stat(path)
        except OSError:
            continue
        first = seen.setdefault((info.st_dev, info.st_ino), path)
        if first != path:
            found.append(
                fail(
                    "directory",
                    f"{path} and {first} are the same directory: the server doesn't start",
                    "give it once in storage_backends",
                )
            )
    return found


def usable(path: str) -> Finding:
    """Whether it is there, or can be made, and can be written."""
    there = nearest(path)
    try:
        is_directory = stat.S_ISDIR(os.stat(there).st_mode)
    except OSError as error:
        return fail("directory", f"{there}: {error.strerror}", f"make {path}, or name another one")
    if not is_directory:
        return fail("directory", f"{there} is not a directory", "name another one")
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"cachestore doctor")
            file.flush()
    except OSError as error:
        return fail("directory", *_unwritable(path, there, error))
    if there != path:
        return ok("directory", f"{path} isn't there yet; it can be made in {there}")
    return ok("directory", f"{path} can be written")


def _unwritable(path: str, there: str, error: OSError) -> tuple[str, str]:
    why = f"{there} can't be written by user {os.geteuid()}: {error.strerror}"
    if error.errno == errno.EROFS:
        return why + "; what it holds is served, nothing is stored", "mount it for writing"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return why, "make room, and set posix_capacity_gb below what is there"
    info = os.stat(there)
    why += f" (it belongs to {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o})"
    return why, f"have its owner make {path} for user {os.geteuid()}, or run this as the server's"


def protection(path: str) -> list[Finding]:
    """Whether others can put their files in the place of ours."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return []
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return [
            warn(
                "directory",
                f"{path} can be written by every user: they can rename or remove what is there",
                f"chmod o-w {path} (or chmod +t, if several users have caches there)",
            )
        ]
    return []


def file_system(path: str, mount: Mount | None, zero_copy: str) -> Finding:
    """Which one it is, and what that means."""
    check = "file system"
    if mount is None:
        return warn(check, f"{path}: it can't be told which", "see to /proc/self/mountinfo")
    what = f"{path} is on {mount.kind} ({mount.source} at {mount.point})"
    if mount.kind in ("tmpfs", "ramfs"):
        return warn(
            check,
            f"{what}: blocks take memory, and are gone when it is unmounted or the host restarts",
            "name a directory on a disk, unless that is what you want",
        )
    if mount.kind == "overlay":
        return warn(
            check,
            f"{what}, the container's own layer: blocks are gone with the container, and slow",
            f"mount a volume at it (docker run -v /nvme/kv:{path})",
        )
    if mount.is_local:
        how = "through buffers" if zero_copy == "never" else "straight into and out of host pages"
        return ok(check, f"{what}: local; file I/O goes {how}")
    if zero_copy == "always":
        return warn(
            check,
            f"{what}: its I/O may hang, and posix_zero_copy: always has requests wait for it",
            "set posix_zero_copy: auto",
        )
    if mount.kind.startswith("nfs") and (
        "nolock" in mount.options or mount.option("local_lock") in ("all", "posix")
    ):
        return warn(
            check,
            f"{what}, mounted without locks between hosts: one may remove what another is "
            "writing (that dump fails), and each keeps the whole capacity for itself",
            "mount it without nolock and local_lock",
        )
    kind = "a network file system" if mount.is_network else "not known to be local"
    return ok(
        check,
        f"{what}: {kind}; its I/O goes through buffers, and a request ends after timeout_ms "
        "whatever it does",
    )


def direct_io(path: str, wanted: bool | str) -> Finding:
    """Whether O_DIRECT works there, tried with a file."""
    check = "O_DIRECT"
    problem = try_direct(nearest(path))
    if problem is None:
        return ok(check, f"{path}: works, and io_direct is {_word(wanted)}")
    what = f"{path}: doesn't work ({problem})"
    if wanted == "required":
        return fail(check, f"{what}, and io_direct is required", "set io_direct: true or false")
    if wanted:
        return warn(
            check,
            f"{what}: files go through the page cache, whatever io_direct says",
            "set io_direct: false, or name a directory on a file system that has it",
        )
    return ok(check, f"{what}; io_direct is false, so it isn't used")


def _word(value: bool | str) -> str:
    return str(value).lower()


def try_direct(directory: str) -> str | None:
    """Write and read 4096 bytes with O_DIRECT; what refused, or None."""
    number, name = tempfile.mkstemp(prefix=".cachestore-doctor-", dir=directory)
    os.close(number)
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as buffer:  # aligned
            buffer.write(b"x" * mmap.PAGESIZE)
            number = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                view = memoryview(buffer)[:4096]
                with view:
                    if os.pwrite(number, view, 0) != 4096:
                        return "a short write"
                    if os.preadv(number, [view], 0) != 4096:
                        return "a short read"
            finally:
                os.close(number)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.unlink(name)
    return None
