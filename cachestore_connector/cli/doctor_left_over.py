"""`cachestore doctor`: what lies about that nobody uses any more.

What is alive is told by locks that the kernel gives back (docs/format.md), never by a name or an
age; nothing is removed here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .. import clearing, instances, leftovers, on_disk
from . import output
from .doctor_finding import Finding, ok, warn

_REGION = re.compile(r"cachestore-region-(\d+)-[0-9a-f]{32}")
_STATS = re.compile(r"cachestore-stats-(\d+)")
_REGION_LOCKS = (0, 16 + 64)  # the attach lock, and one byte for each process


def segments(directory: str) -> list[Finding]:
    """Cache buffers that no process holds."""
    check = "left-over buffers"
    held, left, foreign = [], [], []
    try:
        paths = sorted(Path(directory).iterdir())
    except OSError:
        return []  # said elsewhere
    for path in paths:
        match = _REGION.fullmatch(path.name)
        if match is None:
            continue
        try:
            size = path.lstat().st_size
            alive = instances.is_locked(path, *_REGION_LOCKS)
        except FileNotFoundError:
            continue
        except OSError:
            foreign.append(path)
            continue
        (held if alive else left).append((path, size, int(match[1])))
    found = []
    for path, size, user in left:
        whose = "" if user == os.geteuid() else f" of user {user}"
        found.append(
            warn(
                check,
                f"{path}: {output.amount(size)}{whose}, and no process holds it (a server was "
                "killed)",
                "start the server again, as the same user: it stores what was only there, and "
                f"removes it; or lose that, and rm {path}",
            )
        )
    if not found:
        said = f"none in {directory}"
        if held:
            said += f"; {len(held)} in use"
        if foreign:
            said += f"; {len(foreign)} of other users, who alone can tell whether they are in use"
        found.append(ok(check, said))
    return [*found, *_dead_statistics(directory)]


def _dead_statistics(directory: str) -> list[Finding]:
    """Files of counters (`<pid>-<n>.json`) whose writers are gone."""
    dead = []
    for below in sorted(Path(directory).glob("cachestore-stats-*")):
        if not _STATS.fullmatch(below.name):
            continue
        try:
            names = sorted(os.listdir(below))
        except OSError:
            continue
        for name in names:
            pid = name.partition("-")[0]
            if name.endswith(".json") and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                dead.append(below / name)
    if not dead:
        return []
    return [
        warn(
            "left-over files",
            f"{output.count(len(dead), 'file')} of counters of processes that are gone, such as "
            f"{dead[0]} (a few kilobytes each)",
            "rm them, if no container has this directory too",
        )
    ]


def in_directory(root: str) -> list[Finding]:
    """Below an entry of ``storage_backends``: temporary files, trash, old and foreign caches."""
    if not os.path.isdir(root):
        return []
    check = "left-over files"
    found = []
    abandoned, trash, old, foreign, damaged = [], [], [], [], []
    for identity in on_disk.identities(root):
        try:
            listed = instances.listed(identity.path)
            abandoned += [each for each in listed if instances.is_alive(each) is False]
            trash += clearing.trash(identity.path)
        except PermissionError:
            foreign.append(identity.path)
            continue
        if leftovers.older_version(identity.path):
            old.append(identity.path)
        elif identity.problem:
            damaged.append(f"{identity.path}: {identity.problem}")
    if abandoned:
        found.append(
            warn(
                check,
                f"{output.count(len(abandoned), 'directory', 'directories')} of temporary files "
                f"whose writers are gone, such as {abandoned[0]}",
                f"cachestore gc --store {root} (or the next start of that model) removes them",
            )
        )
    if trash:
        found.append(
            warn(
                check,
                f"cleared but not removed: {output.count(len(trash), 'directory', 'directories')}, "
                f"such as {trash[0]}",
                f"cachestore gc --store {root} removes them",
            )
        )
    if old:
        found.append(
            warn(
                check,
                f"{output.count(len(old), 'cache')} of an earlier version, which nothing reads any "
                f"more, such as {old[0]}",
                f"cachestore gc --store {root} removes them; so does eviction",
            )
        )
    if damaged:
        found.append(
            warn(
                check,
                f"{output.count(len(damaged), 'cache')} whose identity.json can't be used: "
                f"{damaged[0]}",
                "nothing for the server, which writes it anew; rm -r caches that nothing serves",
            )
        )
    if foreign:
        uid = foreign[0].lstat().st_uid
        found.append(
            warn(
                check,
                f"{output.count(len(foreign), 'cache')} that user {os.geteuid()} may not read, "
                f"such as {foreign[0]} of user {uid}: it neither gets nor evicts their blocks",
                "have all servers that share a directory run as one user",
            )
        )
    return found or [ok(check, f"none in {root}")]
