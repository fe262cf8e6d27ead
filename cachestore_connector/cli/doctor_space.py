"""`cachestore doctor`: free space and inodes, beside what the settings want of them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from .. import config as settings
from .. import instances, on_disk
from ..mounts import nearest
from . import output
from .doctor_finding import Finding, fail, ok, warn

_GIB = 1 << 30
# Files that are counted where no collector says what is used; half a second.
_COUNTED = 50_000
# Of a page, where nothing is stored that would tell.
_PAGE = 1 << 20


def capacity_of(config: settings.Config, index: int) -> int | None:
    """Bytes that one of ``storage_backends`` may hold, or None."""
    given = config.posix_capacity_gb
    if given is None:
        return None
    each = given[index] if isinstance(given, tuple) else given / len(config.storage_backends)
    return int(each * _GIB)


def checks(config: settings.Config, index: int, path: str, there: str) -> list[Finding]:
    """Space and inodes of one directory; ``there`` is its nearest ancestor that exists."""
    system = os.statvfs(there)
    used, files, all_counted = stored(path)
    capacity = capacity_of(config, index)
    reserve = int((config.posix_free_space_reserve_gb or 0) * _GIB)
    return [
        space(
            path,
            capacity=capacity,
            reserve=reserve,
            total=system.f_blocks * system.f_frsize,
            free=system.f_bavail * system.f_frsize,
            used=used,
            used_is_all=all_counted,
        ),
        inodes(
            path,
            total=system.f_files,
            free=system.f_favail,
            bytes_to_come=max(0, (capacity or used + system.f_bavail * system.f_frsize) - used),
            file_size=used // files if files else _PAGE,
        ),
        *limits_agree(path, config, capacity or 0, reserve),
    ]


def _state(path: str) -> dict[str, int]:
    """What the collector says of a directory; empty if there is none."""
    try:
        with open(os.path.join(path, "collector", "state"), encoding="ascii") as file:
            lines = [line.split() for line in file]
        return {fields[0]: int(fields[1]) for fields in lines if len(fields) == 2}
    except (OSError, ValueError):
        return {}


def limits_agree(path: str, config: settings.Config, capacity: int, reserve: int) -> list[Finding]:
    """Whether who evicts there now does it by the same limits as these."""
    try:
        if not instances.is_locked(Path(path, "collector", "lock")):
            return []
    except OSError:
        return []
    state = _state(path)
    ours = {
        "capacity": capacity,
        "free_space_reserve": reserve,
        "high_watermark_percent": config.posix_high_watermark_percent,
        "low_watermark_percent": config.posix_low_watermark_percent,
    }
    differ = [
        f"{name} {state[name]:,}, not {value:,}"
        for name, value in ours.items()
        if state.get(name, value) != value
    ]
    if not differ:
        return []
    return [
        warn(
            "eviction",
            f"{path}: a running server evicts there by other limits: {'; '.join(differ)}",
            "give the same posix_ limits to every server that uses the directory",
        )
    ]


def stored(path: str) -> tuple[int, int, bool]:
    """(bytes, files) of blocks in a directory, and whether they are all."""
    state = _state(path)
    if "used" in state and "files" in state:
        return state["used"], state["files"], True
    try:
        every = (block.size for each in on_disk.identities(path) for block in on_disk.blocks(each))
        sizes = list(itertools.islice(every, _COUNTED))
    except FileNotFoundError:
        return 0, 0, True
    except OSError:
        return 0, 0, False
    return sum(sizes), len(sizes), len(sizes) < _COUNTED


def space(
    path: str,
    *,
    capacity: int | None,
    reserve: int,
    total: int,
    free: int,
    used: int,
    used_is_all: bool,
) -> Finding:
    """Whether what the settings want is there. All in bytes; ``used``: by blocks already."""
    check = "disk space"
    said = "" if used_is_all else "at least "
    what = (
        f"{path}: {output.amount(free)} of {output.amount(total)} free, blocks take "
        f"{said}{output.amount(used)}"
    )
    if reserve >= total:
        return fail(
            check,
            f"{what}; posix_free_space_reserve_gb is more than the whole disk: nothing is stored",
            "lower posix_free_space_reserve_gb",
        )
    if capacity is not None and capacity > total - reserve:
        return fail(
            check,
            f"{what}; the capacity, {output.amount(capacity)}, is more than the disk has: it is "
            "full before eviction begins",
            f"set posix_capacity_gb so that this directory's part is at most "
            f"{(total - reserve) * 0.9 / _GIB:.0f} (GiB)",
        )
    if reserve and free < reserve + reserve // 16:
        return warn(
            check,
            f"{what}; posix_free_space_reserve_gb wants {output.amount(reserve)} left: blocks "
            "are evicted, and none are stored below that",
            "make room, or lower posix_free_space_reserve_gb",
        )
    if capacity is not None and used_is_all and capacity > used + free - reserve:
        return warn(
            check,
            f"{what}; the capacity is {output.amount(capacity)}, others fill the disk before "
            "that is reached",
            "make room, lower posix_capacity_gb, or set posix_free_space_reserve_gb too",
        )
    if free < max(total // 100, 64 << 20):
        return warn(check, f"{what}: almost full", "make room, or set posix_capacity_gb")
    limit = "no capacity is set" if capacity is None else f"capacity {output.amount(capacity)}"
    return ok(check, f"{what}; {limit}")


def inodes(path: str, *, total: int, free: int, bytes_to_come: int, file_size: int) -> Finding:
    """Whether there are as many files to be had as blocks are to come."""
    check = "inodes"
    if total == 0:
        return ok(check, f"{path}: made as they are needed")
    wanted = bytes_to_come // max(1, file_size)
    what = f"{path}: {free:,} free"
    if free < 100:
        return fail(
            check,
            f"{what}: no file can be made, so nothing is stored, however much space is free",
            "remove files, or make the file system with more inodes",
        )
    if free < wanted:
        return warn(
            check,
            f"{what}, and {output.count(wanted, 'block')} of {output.amount(file_size)} would "
            "fill it: dumps fail before the space is used up",
            "lower posix_capacity_gb, take larger pages, or make the file system with more inodes",
        )
    more = output.count(wanted, "more block")
    return ok(check, f"{what}; room for {more} of {output.amount(file_size)}")


def shared_disks(config: settings.Config) -> list[Finding]:
    """Whether several of the directories are on one disk, and their capacities are too much."""
    if len(config.storage_backends) < 2:
        return []
    on: dict[int, list[int]] = {}
    for index, path in enumerate(config.storage_backends):
        try:
            on.setdefault(os.stat(nearest(path)).st_dev, []).append(index)
        except OSError:
            continue
    found = []
    for indexes in on.values():
        if len(indexes) < 2:
            continue
        paths = [config.storage_backends[index] for index in indexes]
        what = f"{' and '.join(paths)} are on one disk: nothing gets faster by that"
        system = os.statvfs(nearest(paths[0]))
        capacity = sum(capacity_of(config, index) or 0 for index in indexes)
        if capacity > system.f_blocks * system.f_frsize:
            found.append(
                fail(
                    "disk space",
                    f"{what}, and their capacities together, {output.amount(capacity)}, are more "
                    "than it has",
                    "lower posix_capacity_gb",
                )
            )
        else:
            found.append(warn("directories", what, "name one of them, or one on each disk"))
    return found
