"""The limit of copies between host pages and the cache's buffer: `memcpy`, and streaming stores.

``copy_probe.cc`` does it, compiled for the run with the store's own copy kernels. Counted: waking
the threads, which wait as copy workers do, and one copy of every page between the pool's memory
and a buffer as large as the cache's and mapped like it. Not counted, since not done: block ids,
the queue, slots, and the checksum that a dump leaves in its slot; `CHECKSUMMED` has that.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compiled

MEMCPY = "memcpy"
STREAMING = "streaming"
CHECKSUMMED = "streaming, checksummed"
_WAYS = {MEMCPY: 0, STREAMING: 1, CHECKSUMMED: 2}  # as in copy_probe.cc
_ERROR_BYTES = 1024
# Of the store: its copy kernels, and what makes buffer and threads like its own.
_PARTS = (
    "base/checksum*",
    "base/env",
    "base/fork",
    "base/rename_new",
    "base/shared_memory",
    "base/status",
    "host_copy/affinity",
    "host_copy/copy_kernel*",
    "host_copy/system",
)


@functools.cache
def _library() -> ctypes.CDLL:
    probe = compiled.HERE / "copy_probe.cc"
    library = compiled.shared_library([probe, *compiled.native_sources(*_PARTS)])
    library.cs_copy_open.restype = ctypes.c_void_p
    return library


class IoVector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def io_vectors(pages: Sequence[Sequence[np.ndarray]]) -> Any:
    """An array of `IoVector`: the tensors of each page."""
    flat = [IoVector(tensor.ctypes.data, len(tensor)) for page in pages for tensor in page]
    return (IoVector * len(flat))(*flat)


class CopyProbe:
    """A buffer of ``slots`` slots and ``threads`` threads. Not for use from several threads.

    ``source``, ``target``: per page, its tensors. ``directory``: of the buffer's file on a tmpfs;
    None: private memory.
    """

    def __init__(
        self,
        source: Sequence[Sequence[np.ndarray]],
        target: Sequence[Sequence[np.ndarray]],
        *,
        slots: int,
        slot_size: int,
        threads: int,
        directory: str | None,
    ) -> None:
        """Raises `CompilerMissing`, or MemoryError with the reason."""
        self._source, self._target = io_vectors(source), io_vectors(target)
        self._pages, self._tensors = len(source), len(source[0])
        self._slots, self._slot_size = slots, slot_size
        self._first = 0
        self._library = _library()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._handle = ctypes.c_void_p(
            self._library.cs_copy_open(
                None if directory is None else os.fsencode(directory),
                ctypes.c_uint64(slots * slot_size),
                threads,
                error,
                ctypes.c_size_t(_ERROR_BYTES),
            )
        )
        if not self._handle:
            raise MemoryError(error.value.decode(errors="replace"))

    def dump(self, way: str) -> None:
        """Copy every page into the buffer: into the next slots, as a cache that is full does."""
        self._first = (self._first + self._pages) % self._slots
        self._run(self._source, True, way)

    def load(self, way: str) -> None:
        """Copy what the latest dump left to the target pages."""
        self._run(self._target, False, way)

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.cs_copy_close(handle)

    def _run(self, parts: Any, into_buffer: bool, way: str) -> None:
        self._library.cs_copy_run(
            self._handle,
            ctypes.c_size_t(self._pages),
            parts,
            ctypes.c_size_t(self._tensors),
            ctypes.c_size_t(self._first),
            ctypes.c_size_t(self._slot_size),
            int(into_buffer),
            _WAYS[way],
        )
