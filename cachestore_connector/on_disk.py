"""What lies in a directory of blocks, read without opening a store: identities, their blocks.

Safe beside running servers: nothing is written, and what vanishes while it is looked at is passed
by. The layout is docs/format.md's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from . import manifest

BLOCKS = "blocks"
MANIFEST = "identity.json"
COLLECTOR = "collector"
# In a root that is a file system's: its own, for nobody else to read.
FILESYSTEMS_OWN = "lost+found"

_ID_DIGITS = 32


@dataclasses.dataclass(frozen=True)
class StoredIdentity:
    """One directory of blocks. ``problem``: why its manifest can't be used, or empty."""

    path: Path
    manifest: manifest.Manifest | None
    problem: str

    @property
    def name(self) -> str:
        """The directory's name: model, family, pool and fingerprint (docs/format.md)."""
        return self.path.name


@dataclasses.dataclass(frozen=True)
class Block:
    """A block file. ``size``: bytes. ``used``: when it was last used, in seconds since 1970."""

    path: Path
    size: int
    used: float

    @property
    def block_id(self) -> str:
        """32 hex digits."""
        return self.path.name


def identities(root: str | Path) -> list[StoredIdentity]:
    """Those below an entry of ``storage_backends``, by name.

    A directory without a manifest is one if it has a `blocks` directory in it; one whose name
    begins with a dot never is. Raises OSError if ``root`` can't be listed.
    """
    found = []
    with os.scandir(root) as entries:
        paths = sorted(
            Path(entry.path)
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
            and not entry.name.startswith(".")
            and entry.name not in (COLLECTOR, FILESYSTEMS_OWN)
        )
    for path in paths:
        try:
            content = (path / MANIFEST).read_bytes()
        except FileNotFoundError:
            if (path / BLOCKS).is_dir():
                found.append(StoredIdentity(path, None, f"no {MANIFEST}"))
            continue
        except OSError as error:
            found.append(StoredIdentity(path, None, f"{MANIFEST}: {error.strerror}"))
            continue
        try:
            described = manifest.read(content, MANIFEST)
        except manifest.ManifestError as error:
            found.append(StoredIdentity(path, None, str(error)))
        else:
            found.append(StoredIdentity(path, described, ""))
    return found


def blocks(identity: StoredIdentity | Path) -> Iterator[Block]:
    """The block files of an identity, a fan-out directory after the other, sorted in each.

    Files that aren't named as blocks are left out. Raises OSError for a directory that can't be
    listed, other than one that is gone.
    """
    path = identity if isinstance(identity, Path) else identity.path
    for directory in _sorted_names(path / BLOCKS):
        below = path / BLOCKS / directory
        for name in _sorted_names(below) if below.is_dir() else ():
            if len(name) != _ID_DIGITS or not set(name) <= set("0123456789abcdef"):
                continue
            try:
                info = (below / name).lstat()
            except FileNotFoundError:
                continue
            yield Block(below / name, info.st_size, info.st_mtime)


def _sorted_names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
