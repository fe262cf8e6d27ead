"""Which file system a path is on, as the kernel tells it."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

# Those whose I/O is sure to end, as native/src/posix/directory.cc has them.
_LOCAL = frozenset(
    [
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "f2fs",
        "zfs",
        "bcachefs",
        "jfs",
        "tmpfs",
        "ramfs",
        "overlay",
    ]
)
_NETWORK = re.compile(
    r"nfs\d*|cifs|smb\d*|ceph|lustre|gpfs|glusterfs|beegfs\w*|9p|afs|virtiofs|fuse\..*|pvfs2|wekafs"
)


@dataclasses.dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo. ``options``: the mount's and the file system's."""

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def is_local(self) -> bool:
        """Its I/O is sure to end: it goes without a copy."""
        return self.kind in _LOCAL

    @property
    def is_in_memory(self) -> bool:
        """Its files never leave memory."""
        return self.kind in ("tmpfs", "ramfs")

    @property
    def is_network(self) -> bool:
        """Other machines, or a process, stand between us and the data."""
        return _NETWORK.fullmatch(self.kind) is not None

    @property
    def is_read_only(self) -> bool:
        """Nothing can be written there."""
        return "ro" in self.options

    def option(self, name: str) -> str | None:
        """The value of ``name=value``, or None."""
        for each in self.options:
            key, equals, value = each.partition("=")
            if equals and key == name:
                return value
        return None


def mount_of(path: str, table: str = "/proc/self/mountinfo") -> Mount | None:
    """The mount that an existing path lies on; None if it can't be told."""
    real = os.path.realpath(path)
    best: Mount | None = None
    try:
        lines = Path(table).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields, of_system = before.split(), after.split()
        if not separator or len(fields) < 6 or len(of_system) < 2:
            continue
        point = _unescaped(fields[4])
        if real != point and not real.startswith(point.rstrip("/") + "/"):
            continue
        if best is not None and len(point) < len(best.point):
            continue  # of two on the same point the later one is seen
        options = fields[5].split(",") + (of_system[2].split(",") if len(of_system) > 2 else [])
        best = Mount(point, of_system[0], _unescaped(of_system[1]), frozenset(options))
    return best


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def nearest(path: str) -> str:
    """The path itself, or its nearest ancestor that is there."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path
