"""Whether a case fits into this machine's memory and file systems, and how much of it does."""

from __future__ import annotations

import os
from typing import TypeVar

from cachestore_connector.host_memory import available_memory

from .cases import CacheCase, Case, ColdCase
from .pools import pool_pages

_MARGIN = 1 << 28
_FEWEST_PAGES = 8

_Shrinking = TypeVar("_Shrinking", CacheCase, ColdCase)


def lack(case: Case | CacheCase | ColdCase, directory: str) -> str | None:
    """Why the case can't run here, if it can't. ``directory``: where its files go."""
    files, memory = _needs(case)
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < files:
        return f"{free / 1e6:.0f} MB free for files, {files / 1e6:.0f} MB needed"
    available = available_memory()
    if available is not None and available < memory:
        return f"{available / 1e6:.0f} MB of memory, {memory / 1e6:.0f} MB needed"
    return None


def fitted(case: _Shrinking, directory: str) -> tuple[_Shrinking | None, str | None]:
    """The case with as many of its pages as fit, by halves, and why they are fewer, if they are."""
    reason = first = lack(case, directory)
    while reason is not None and case.pages // 2 >= _FEWEST_PAGES:
        case = case.with_pages(case.pages // 2)
        reason = lack(case, directory)
    return (case if reason is None else None), first


def buffer_slots(pages: int) -> int:
    """Slots of a buffer that takes a dump of ``pages`` pages whole.

    An eighth is kept for loads, and a dump may make 87 % of it dirty.
    """
    return pages * 5 // 4 + 4


def _needs(case: Case | CacheCase | ColdCase) -> tuple[int, int]:
    """Bytes of files and of memory, files in memory included."""
    if isinstance(case, Case):
        stored = case.pages if case.medium == "shm" else 0
        files, memory = case.pages, pool_pages(case) + stored
    elif isinstance(case, CacheCase):
        files = case.pages + 2 * buffer_slots(case.pages)  # stored; ours and the probe's buffer
        memory = files + pool_pages(case)
    else:
        files = case.pages * 2 + buffer_slots(case.pages)
        memory = files + (case.ranks + 1) * case.pages + 1
    page = case.model.page_bytes
    return files * page + _MARGIN, memory * page + _MARGIN
