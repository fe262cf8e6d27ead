"""How much memory this host, or this container of it, has left."""

from __future__ import annotations

from pathlib import Path


def available_memory(root: str = "/") -> int | None:
    """Bytes that may still be allocated: the least of the system's and the cgroups'."""
    base = Path(root)
    least: int | None = None
    try:
        for line in (base / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                least = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    group = ""
    try:
        for line in (base / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = line[3:].strip("/")
    except OSError:
        pass
    top = base / "sys/fs/cgroup"
    at = top / group
    pairs = [(top / "memory/memory.limit_in_bytes", top / "memory/memory.usage_in_bytes")]
    for directory in (at, *at.parents):
        if directory != top and top not in directory.parents:
            break
        pairs.append((directory / "memory.max", directory / "memory.current"))
    for limit_file, usage_file in pairs:
        try:
            room = max(0, int(limit_file.read_text()) - int(usage_file.read_text()))
        except (OSError, ValueError):  # "max": no limit
            continue
        least = room if least is None else min(least, room)
    return least
