"""`cachestore du`: what takes the space, and how much is free."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from .. import clearing, disk_usage, instances, on_disk
from ..disk_usage import Usage
from . import output, places


@output.command()
@places.options
def du(out: output.Output, stores: tuple[str, ...], config_path: str | None) -> output.Status:
    """Say how much room caches take, and what the file system has free.

    Files, inodes and bytes, of what is on its way in and out too. `allocated` is what the file
    system counts for files and directories, `bytes` what the files have.
    """
    found, status = [], output.Status.OK
    for root in places.roots(stores, config_path):
        each = _described(root)
        found.append(each)
        if each["problems"]:
            status = output.Status.FOUND
        _show(out, each)
    out.result(found)
    return status


def _described(root: str) -> dict[str, Any]:
    identities, problems, known = [], [], Usage()
    for identity in on_disk.identities(root):
        path = identity.path
        try:
            whole = disk_usage.of(path)
            parts = {
                "blocks": disk_usage.of(path / on_disk.BLOCKS),
                "temporary": disk_usage.of(path / instances.TMP),
                "trash": disk_usage.of(path / clearing.TRASH),
            }
        except OSError as error:
            problems.append({"path": str(path), "problem": error.strerror or str(error)})
            continue
        known += whole
        described = identity.manifest
        identities.append(
            {
                "path": str(path),
                "name": identity.name,
                "model": None if described is None else described.model,
                "pool": None if described is None else described.identity["pool"],
                **{name: _numbers(usage) for name, usage in parts.items()},
                "other": _numbers(whole - sum(parts.values(), Usage())),
            }
        )
    collector = disk_usage.of(Path(root, on_disk.COLLECTOR))
    own = Usage(directories=1, allocated=os.stat(root).st_blocks * 512)
    unreadable = {each["path"] for each in problems}
    other = _other(root, {each["path"] for each in identities} | unreadable, problems)
    return {
        "root": root,
        "identities": identities,
        "collector": _numbers(collector),
        "other": _numbers(other),
        "total": _numbers(known + collector + other + own),
        "filesystem": dataclasses.asdict(disk_usage.space(root)),
        "problems": problems,
    }


def _other(root: str, identities: set[str], problems: list[dict[str, str]]) -> Usage:
    """What else lies there."""
    other = Usage()
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if name in (on_disk.COLLECTOR, on_disk.FILESYSTEMS_OWN) or path in identities:
            continue
        try:
            other += disk_usage.of(path)
        except OSError as error:
            problems.append({"path": path, "problem": error.strerror or str(error)})
    return other


def _numbers(usage: Usage) -> dict[str, int]:
    return {
        "files": usage.files,
        "inodes": usage.inodes,
        "bytes": usage.size,
        "allocated": usage.allocated,
    }


def _show(out: output.Output, each: dict[str, Any]) -> None:
    caches: dict[str, list[dict[str, Any]]] = {}
    for identity in each["identities"]:
        cache = identity["name"].rpartition(".")[0] or identity["name"]
        caches.setdefault(cache, []).append(identity)
    rows = [
        (name, [identity["blocks"] for identity in members]) for name, members in caches.items()
    ]
    for label, part in (
        ("being written (tmp)", "temporary"),
        ("cleared (trash)", "trash"),
        ("manifests and marks", "other"),
    ):
        rows.append((label, [identity[part] for identity in each["identities"]]))
    rows += [("collector", [each["collector"]]), ("other files", [each["other"]])]
    rows = [(name, numbers) for name, numbers in rows if name in caches or _sum(numbers, "inodes")]
    rows.append(("all", [each["total"]]))
    out.line(each["root"])
    out.table(
        ("cache", "files", "inodes", "bytes", "allocated"),
        [
            (
                name,
                f"{_sum(numbers, 'files'):,}",
                f"{_sum(numbers, 'inodes'):,}",
                output.amount(_sum(numbers, "bytes")),
                output.amount(_sum(numbers, "allocated")),
            )
            for name, numbers in rows
        ],
        right="files,inodes,bytes,allocated",
        whole="cache",
    )
    space = each["filesystem"]
    inodes = f", {space['inodes_free']:,} of {space['inodes']:,} inodes" if space["inodes"] else ""
    out.line(f"free: {output.amount(space['free'])} of {output.amount(space['size'])}{inodes}")
    for problem in each["problems"]:
        out.line(f"not counted: {problem['path']}: {problem['problem']}")


def _sum(numbers: list[dict[str, int]], name: str) -> int:
    return sum(each[name] for each in numbers)
