"""Whether a block file is what was stored: its record, and every tensor's checksum.

As a load checks it (docs/format.md), but from any process and beside running stores. A published
file is never changed in place: another one takes its name, or it vanishes. So what is judged is the
open file, and what is found is said of the path only if it still has that name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import instances
from .manifest import RECORD_BYTES, RECORD_VERSION, Manifest
from .store import crc32c

# A damaged file has this in its name for the moment in which it is looked at once more.
ASIDE = ".aside-"

_MAGIC = b"CSBLOCK1"
_HEAD = struct.Struct("<8sII32s16s16sQQIIII")
_CRC32C = 1
_CHUNK = 1 << 20
_TRIES = 8
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


class State(enum.Enum):
    """What a block is."""

    RIGHT = "right"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"  # the system gave an error
    UNKNOWN = "unknown"  # of a version that can't be checked
    GONE = "gone"  # evicted, cleared or replaced while it was looked at


@dataclasses.dataclass(frozen=True)
class Record:
    """What a block says of itself. ``checksums``: one a tensor, shard after shard."""

    version: int
    fingerprint: bytes
    block_id: bytes
    boot_id: bytes
    payload: int
    stride: int
    shards: int
    tensor_sizes: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Checked:
    """``size``: bytes of the file. ``problem``: why it isn't right, or empty.

    ``wrong``: numbers of the tensors whose checksums aren't right, counted shard after shard.
    """

    path: Path
    state: State
    problem: str = ""
    size: int = 0
    record: Record | None = None
    wrong: tuple[int, ...] = ()


class Stopped(Exception):
    """`Checker.stop` was called."""


class _Damaged(Exception):
    """Why, in words; with the record, if that is right."""

    def __init__(self, why: str, record: Record | None = None, wrong: tuple[int, ...] = ()):
        super().__init__(why)
        self.record, self.wrong = record, wrong


class _Unknown(Exception):
    """It can't be checked."""


class RateLimit:
    """So many bytes a second, by all threads together. Thread-safe."""

    def __init__(
        self, rate: float, wait: Callable[[float], object] = time.sleep, clock=time.monotonic
    ) -> None:
        self._rate, self._wait, self._clock = rate, wait, clock
        self._lock = threading.Lock()
        self._next = clock()

    def take(self, size: int) -> None:
        """Wait until so many bytes may be read."""
        with self._lock:
            now = self._clock()
            begin = max(self._next, now)
            self._next = begin + size / self._rate
        if begin > now:
            self._wait(begin - now)


class Checker:
    """Reads and checks blocks. Thread-safe; each thread has a buffer of 1 MiB.

    ``rate``: the most bytes to read a second, in all; None: as fast as it goes. The page cache is
    left alone where the filesystem does O_DIRECT.
    """

    def __init__(self, rate: float | None = None) -> None:
        self._stopped = threading.Event()
        self._limit = None if rate is None else RateLimit(rate, self._stopped.wait)
        self._local = threading.local()

    def stop(self) -> None:
        """Have checks that are going on raise `Stopped`."""
        self._stopped.set()

    def check(self, path: Path, described: Manifest | None) -> Checked:
        """Whether a block is right; of the file that has the name at the end.

        ``described``: the manifest of its directory; without one a block is checked by what it
        says itself.
        """
        checked = Checked(path, State.GONE)
        for _ in range(_TRIES):
            with self._opened(path) as opened:
                if isinstance(opened, Checked):
                    return opened
                checked = self._judge(path, opened, described)
                if checked.state is State.RIGHT or _has_name(path, opened):
                    return checked
        return dataclasses.replace(checked, state=State.GONE)

    def remove_damaged(self, path: Path, described: Manifest | None) -> Checked:
        """Check a block once more, and remove it if it is damaged; what it was.

        A file that isn't the one that was checked is never removed: it stays open, so that no
        other can have its number, and is moved aside to be looked at before it goes. Raises OSError
        if it can't be removed.
        """
        with self._opened(path) as opened:
            if isinstance(opened, Checked):
                if opened.state is State.DAMAGED:
                    _remove_no_file(path)
                return opened
            checked = self._judge(path, opened, described)
            if checked.state is State.DAMAGED and not _remove(path, opened):
                return dataclasses.replace(checked, state=State.GONE)
            return checked

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int | Checked]:
        try:
            fd = _open(path)
        except (FileNotFoundError, NotADirectoryError):
            yield Checked(path, State.GONE)
            return
        except OSError as error:
            if error.errno == errno.ELOOP:
                yield Checked(path, State.DAMAGED, "not a regular file")
            else:
                yield Checked(path, State.UNREADABLE, error.strerror or str(error))
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def _judge(self, path: Path, fd: int, described: Manifest | None) -> Checked:
        size = 0
        try:
            info = os.fstat(fd)
            size = info.st_size
            if not stat.S_ISREG(info.st_mode):
                raise _Damaged("not a regular file")
            record = self._read_checked(fd, size, bytes.fromhex(path.name), described)
        except _Damaged as damage:
            return Checked(path, State.DAMAGED, str(damage), size, damage.record, damage.wrong)
        except _Unknown as unknown:
            return Checked(path, State.UNKNOWN, str(unknown), size)
        except OSError as error:
            return Checked(path, State.UNREADABLE, error.strerror or str(error), size)
        return Checked(path, State.RIGHT, "", size, record)

    def _read_checked(
        self, fd: int, size: int, block_id: bytes, described: Manifest | None
    ) -> Record:
        known = described if described and described.record_version == RECORD_VERSION else None
        if known and size != known.block_bytes:
            raise _Damaged(f"{size} bytes, not {known.block_bytes}")
        if size < RECORD_BYTES:
            raise _Damaged(f"{size} bytes, fewer than a record has")
        content = bytes(self._read(fd, size - RECORD_BYTES, RECORD_BYTES))
        record = _parse(content, unknown_is_damage=known is not None)
        if record.block_id != block_id:
            raise _Damaged("another block", record)
        if known:
            _match(record, known)
        expected = record.shards * record.stride + RECORD_BYTES
        if size != expected:
            raise _Damaged(f"{size} bytes, not {expected}", record)
        sums = self._sums(fd, record)
        wrong = tuple(i for i, right in enumerate(record.checksums) if sums[i] != right)
        if wrong:
            shard, tensor = divmod(wrong[0], len(record.tensor_sizes))
            raise _Damaged(f"checksum of tensor {tensor} of shard {shard} differs", record, wrong)
        return record

    def _sums(self, fd: int, record: Record) -> list[int]:
        """Checksums of all tensors, of a shard's last one with the padding."""
        sums: list[int] = []
        ends = _ends(record)
        total = record.shards * record.stride
        end, value = next(ends), 0
        for first in range(0, total, _CHUNK):
            chunk = self._read(fd, first, min(_CHUNK, total - first))
            at = 0
            while at < len(chunk):
                until = min(end - first, len(chunk))
                value = crc32c(chunk[at:until], value)
                at = until
                if first + at == end:
                    sums.append(value)
                    end, value = next(ends, -1), 0
        return sums

    def _read(self, fd: int, offset: int, size: int) -> memoryview:
        """So many bytes, at most `_CHUNK`; they are there until the next call of this thread."""
        if self._limit is not None:
            self._limit.take(size)
        if self._stopped.is_set():
            raise Stopped
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:  # mapped memory is aligned, as O_DIRECT wants it
            buffer = self._local.buffer = memoryview(mmap.mmap(-1, _CHUNK))
        done = 0
        while done < size:
            try:
                count = os.preadv(fd, [buffer[done:size]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not _stop_direct(fd):
                    raise
                continue
            if count == 0:
                raise _Damaged("it ended early")
            done += count
        return buffer[:size]


def _parse(content: bytes, *, unknown_is_damage: bool) -> Record:
    """What the last 4096 bytes of a block say. Raises `_Damaged`, or `_Unknown` for a version."""
    if content[:8] != _MAGIC:
        raise _Damaged("no block record")
    if crc32c(content[:-4]) != int.from_bytes(content[-4:], "little"):
        raise _Damaged("damaged record")
    _, version, size, fingerprint, block_id, boot, payload, stride, shards, tensors, kind, zero = (
        _HEAD.unpack_from(content)
    )
    if version != RECORD_VERSION:
        text = f"format version {version}, not {RECORD_VERSION}"
        raise _Damaged(text) if unknown_is_damage else _Unknown(text)
    room = len(content) - 4 - _HEAD.size
    fits = tensors > 0 and shards > 0 and 8 * tensors + 4 * shards * tensors <= room
    if size != RECORD_BYTES or kind != _CRC32C or zero != 0 or not fits:
        raise _Damaged("other sizes")
    sizes = struct.unpack_from(f"<{tensors}Q", content, _HEAD.size)
    sums = struct.unpack_from(f"<{shards * tensors}I", content, _HEAD.size + 8 * tensors)
    padded = -(-sum(sizes) // RECORD_BYTES) * RECORD_BYTES
    if payload != shards * sum(sizes) or stride < padded or stride % RECORD_BYTES or 0 in sizes:
        raise _Damaged("other sizes")
    return Record(version, fingerprint, block_id, boot, payload, stride, shards, sizes, sums)


def _match(record: Record, described: Manifest) -> None:
    if record.fingerprint != described.fingerprint:
        raise _Damaged("another identity", record)
    wanted = (described.payload_bytes, described.shard_bytes, 1)
    sizes = tuple(described.identity["tensor_sizes"])
    if (record.payload, record.stride, record.shards) != wanted or record.tensor_sizes != sizes:
        raise _Damaged("other sizes", record)


def _ends(record: Record) -> Iterator[int]:
    """Where each tensor's bytes end in the file, the last one's of a shard with the padding."""
    for shard in range(record.shards):
        at = shard * record.stride
        for size in record.tensor_sizes[:-1]:
            at += size
            yield at
        yield (shard + 1) * record.stride


def _open(path: Path) -> int:
    try:
        return os.open(path, _FLAGS | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, _FLAGS)


def _stop_direct(fd: int) -> bool:
    """Go on through the page cache; whether that is something new."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def _has_name(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove(path: Path, fd: int) -> bool:
    """Remove the open file, if it still has this name.

    It is moved aside inside its directory, which stays open: a clear takes both away together, so
    that nothing which is put back outlives it.
    """
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise OSError(errno.EISDIR, "a directory: the store moves it out of the way", str(path))
    with _directory(path) as directory:
        if directory is None:
            return False
        aside = path.name + ASIDE + instances.unique_name()
        here = {"src_dir_fd": directory, "dst_dir_fd": directory}
        try:
            os.rename(path.name, aside, **here)
        except FileNotFoundError:
            return False
        try:
            moved = os.stat(aside, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:  # taken for what a process that is gone has left
            return True
        same = os.path.samestat(moved, os.fstat(fd))
        if not same:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(aside, path.name, **here, follow_symlinks=False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=directory)
        return same


def _remove_no_file(path: Path) -> None:
    """Remove a symbolic link in a block's place."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.lstat(path).st_mode):
            os.unlink(path)


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int | None]:
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
