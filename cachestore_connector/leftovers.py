"""What stores that are gone, and versions before, have left in a directory of blocks.

Whether a store is gone is said by the locks in `tmp` alone (docs/format.md). Each kind may be
removed beside running stores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import os
from pathlib import Path
from typing import Any

from . import clearing, disk_usage, instances, on_disk
from .block_check import ASIDE
from .identity import FORMAT_VERSION
from .manifest import MAX_BYTES, RECORD_VERSION

# What an identity is called while it is removed: a name with a dot is no identity's.
_GOING = ".going-"
_IN_USE = "it is in use by now"


class Kind(enum.Enum):
    """What was left."""

    TEMPORARY = "temporary files"  # of a store that is gone
    TRASH = "cleared blocks"
    ASIDE = "a damaged block"  # that `verify --repair` was about to remove
    OLD = "an identity of an older version"
    EMPTY = "an identity without blocks"
    GOING = "an identity being removed"


@dataclasses.dataclass(frozen=True)
class Leftover:
    """A file or directory, with all below it. ``why``: more about it, or empty."""

    kind: Kind
    path: Path
    usage: disk_usage.Usage
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
    """``passed_by``: path and reason of what may be one and stays."""

    leftovers: list[Leftover]
    passed_by: list[tuple[Path, str]]


def find(root: str | Path) -> Found:
    """What lies below an entry of ``storage_backends``. Raises OSError if it can't be listed."""
    found = Found([], [])
    for identity in on_disk.identities(root):
        try:
            _find_in(identity, found)
        except OSError as error:
            found.passed_by.append((identity.path, error.strerror or str(error)))
    for name in sorted(os.listdir(root)):
        if name.startswith(_GOING):
            found.leftovers.append(_leftover(Kind.GOING, Path(root, name)))
    return found


def _leftover(kind: Kind, path: Path, why: str = "") -> Leftover:
    return Leftover(kind, path, disk_usage.of(path), why)


def _find_in(identity: on_disk.StoredIdentity, found: Found) -> None:
    path = identity.path
    is_open = instances.is_open(path)
    old = older_version(path)
    kind = Kind.OLD if old else None if _has_blocks(path) else Kind.EMPTY
    if kind is not None:
        if is_open is False:
            found.leftovers.append(_leftover(kind, path, old))
            return
        why = "a store has it open" if is_open else "whether a store has it open can't be told"
        found.passed_by.append((path, f"{kind.value}{old and f' ({old})'}, but {why}"))
    for instance in instances.listed(path):
        alive = instances.is_alive(instance)
        if alive is False:
            found.leftovers.append(_leftover(Kind.TEMPORARY, instance))
        elif alive is None:
            found.passed_by.append((instance, "whether its store is open can't be told"))
    for cleared in clearing.trash(path):
        found.leftovers.append(_leftover(Kind.TRASH, cleared))
    for directory, _, files in os.walk(path / on_disk.BLOCKS):
        for name in files:
            if ASIDE in name:
                found.leftovers.append(_leftover(Kind.ASIDE, Path(directory, name)))


def _has_blocks(identity: Path) -> bool:
    """Whether anything but empty directories is there, at a block's depth or elsewhere."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return any(files for _, _, files in os.walk(identity / on_disk.BLOCKS, onerror=fail))


def older_version(identity: Path) -> str:
    """Which version before this one an identity is of, in words; empty if of none.

    Manifests of old versions lack what `manifest.read` wants, so that only the number is looked at.
    """
    try:
        with open(identity / on_disk.MANIFEST, "rb") as file:
            fields = json.loads(file.read(MAX_BYTES))
        store = fields.get("store", {})
        pairs: list[tuple[str, Any, int]] = [
            ("format_version", fields.get("format_version"), FORMAT_VERSION),
            ("record_version", store.get("record_version"), RECORD_VERSION),
        ]
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    for name, version, current in pairs:
        if type(version) is int and 0 < version < current:
            return f"{name} {version}, now {current}"
    return ""


def remove(leftover: Leftover) -> str:
    """Remove it, if it still is one: empty, or why not. Raises OSError."""
    if leftover.kind is Kind.TEMPORARY:
        return _remove_instance(leftover.path)
    if leftover.kind is Kind.EMPTY:
        return _remove_empty(leftover.path)
    if leftover.kind is Kind.OLD:
        return _remove_old(leftover.path)
    clearing.remove_tree(leftover.path)
    return ""


def _remove_instance(path: Path) -> str:
    # An empty one may just be being made: its maker makes it again.
    with contextlib.suppress(OSError):
        os.rmdir(path)
        return ""
    try:
        with instances.taken(path) as gone:
            if not gone:
                return "its store is open after all"
            instances.remove(path)
    except FileNotFoundError:
        pass  # somebody else was first
    return ""


def _remove_empty(path: Path) -> str:
    """Empty directories alone, and then what tells of them: no store loses anything by it.

    One that opens the identity meanwhile makes `blocks` first, and makes again what is missing, but
    not its manifest. The mark goes last: to a store that has read it, it would be another's clear.
    """
    if instances.is_open(path) is not False:
        return _IN_USE
    try:
        for instance in instances.listed(path):
            if _remove_instance(instance):
                return _IN_USE
        clearing.remove_trash(path)
        for directory, _, _ in os.walk(path / on_disk.BLOCKS, topdown=False):
            _remove_directory(Path(directory))
        for name in (instances.TMP, clearing.TRASH):
            _remove_directory(path / name)
        described = path / on_disk.MANIFEST
        content = described.read_bytes() if described.exists() else None
        described.unlink(missing_ok=True)
        try:
            if set(os.listdir(path)) == {clearing.MARK}:
                (path / clearing.MARK).unlink(missing_ok=True)
            _remove_directory(path)
        except OSError:
            if content is not None:
                _put_back(described, content)
            raise
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return _IN_USE
    return ""


def _remove_directory(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def _put_back(path: Path, content: bytes) -> None:
    """Unless there is another one."""
    new = path.with_name(f"{path.name}.{instances.unique_name()}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def _remove_old(path: Path) -> str:
    """All at once, so that a store of that version which opens it meanwhile makes a new one."""
    if instances.is_open(path) is not False:
        return _IN_USE
    going = path.with_name(_GOING + instances.unique_name())
    try:
        os.rename(path, going)
    except FileNotFoundError:
        return ""
    if instances.is_open(going) is not False:
        with contextlib.suppress(OSError):  # as where its store has made a new one
            os.rename(going, path)
            return _IN_USE
    clearing.remove_tree(going)
    return ""
