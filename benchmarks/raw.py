"""The raw limit: whole files written and read by a few threads, straight from the pool's memory.

``raw_probe.cc`` does it, compiled for the run. What is counted: for a dump, creating a file, one
``pwritev`` of the page's tensors, closing it; for a load, opening, one ``preadv``, closing; for a
lookup, one ``access`` a key, from one thread; starting the threads. Not counted, since not done:
names from keys, checksums, records, temporary names, renames, a look at what is there already.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

from . import compiled
from .copy_limit import io_vectors
from .pools import HostPages

THREADS = (1, 2, 4, 8)
_DIRECTORIES = 8  # so that creating files at once doesn't queue for one directory


@functools.cache
def _library() -> ctypes.CDLL:
    library = compiled.shared_library([compiled.HERE / "raw_probe.cc"])
    library.cs_raw_lookup.restype = ctypes.c_size_t
    return library


class RawProbe:
    """Page ``i`` of a batch is one file of its bytes. Not for use from several threads."""

    name = "raw"

    def __init__(self, pages: HostPages, directory: str, threads: int, direct: bool) -> None:
        """Make the directories, describe the pool's memory. Raises `CompilerMissing`."""
        self.variant = f"{threads} threads, {'O_DIRECT' if direct else 'buffered'}"
        self._library = _library()
        self._sources = io_vectors(pages.source_tensors)
        self._targets = io_vectors(pages.target_tensors)
        self._parts = len(pages.source_tensors[0])
        self._page_bytes = sum(len(tensor) for tensor in pages.source_tensors[0])
        self._flags = os.O_DIRECT if direct else 0
        self._threads = threads
        self._directories = [os.fsencode(f"{directory}/{n}") for n in range(_DIRECTORIES)]
        for path in self._directories:
            os.makedirs(path, exist_ok=True)
        self._named: tuple[Sequence[str], Any] = ([], None)

    def prepare(self, keys: Sequence[str]) -> None:
        """Make the files' names ahead of the calls, which need them at once."""
        paths = [
            self._directories[number % _DIRECTORIES] + b"/" + key.encode()
            for number, key in enumerate(keys)
        ]
        self._named = (keys, (ctypes.c_char_p * len(paths))(*paths))

    def dump(self, keys: Sequence[str]) -> int:
        """Write every page; how many. Raises OSError."""
        return self._transfer(keys, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._sources)

    def load(self, keys: Sequence[str]) -> int:
        """Read every page; how many. Raises OSError."""
        return self._transfer(keys, os.O_RDONLY, self._targets)

    def lookup(self, keys: Sequence[str]) -> int:
        """How many of the first pages are there."""
        return self._library.cs_raw_lookup(ctypes.c_size_t(len(keys)), self._paths(keys))

    def close(self) -> None:
        """Nothing is held."""

    def _paths(self, keys: Sequence[str]) -> Any:
        if self._named[0] is not keys:
            self.prepare(keys)
        return self._named[1]

    def _transfer(self, keys: Sequence[str], flags: int, vectors: Any) -> int:
        error = self._library.cs_raw_transfer(
            ctypes.c_size_t(len(keys)),
            self._paths(keys),
            flags | self._flags,
            vectors,
            self._parts,
            ctypes.c_size_t(self._page_bytes),
            self._threads,
        )
        if error:
            raise OSError(error, os.strerror(error))
        return len(keys)


def variants(
    pages: HostPages, directory: str, *, buffered: bool, direct: bool, threads: Sequence[int]
) -> list[RawProbe]:
    """A probe for every number of threads and kind of I/O that the file system can do."""
    kinds = ([False] if buffered else []) + ([True] if direct and can_direct(directory) else [])
    return [RawProbe(pages, directory, n, kind) for kind in kinds for n in threads]


def can_direct(directory: str) -> bool:
    """Whether files in ``directory`` can be opened with O_DIRECT."""
    path = os.path.join(directory, "direct")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        if os.path.exists(path):
            os.unlink(path)
    return True
