"""`cachestore ls`: which caches lie in a store, and how much of each."""

from __future__ import annotations

import datetime
from typing import Any

from .. import on_disk
from . import output, places


@output.command()
@places.options
def ls(
    out: output.Output, stores: tuple[str, ...], config_path: str | None
) -> output.Status | None:
    """List what is stored: a line for each cache (a model's pool on one rank).

    Looks at every file's size and time of use, which takes a second for some 100,000.
    """
    found, status = [], output.Status.OK
    for root in places.roots(stores, config_path):
        for identity in on_disk.identities(root):
            found.append(_described(root, identity))
            if found[-1]["problem"]:
                status = output.Status.FOUND
    caches: dict[str, list[tuple[str, ...]]] = {}
    for each in found:
        caches.setdefault(each["cache"], []).append(_row(each))
    if found:
        columns = ("pool", "dtype", "layout", "rank", "pages", "bytes", "used (UTC)")
        out.groups(columns, caches.items(), right="pages,bytes")
    for each in found:
        if each["problem"]:
            out.line(f"{each['path']}: {each['problem']}")
    if not found:
        out.line("nothing is stored there")
    out.result(found)
    return status


def _described(root: str, identity: on_disk.StoredIdentity) -> dict[str, Any]:
    pages = size = 0
    used, problem = None, identity.problem
    try:
        for block in on_disk.blocks(identity):
            pages += 1
            size += block.size
            used = max(used or 0, block.used)
    except OSError as error:
        problem = f"{problem}; {error}" if problem else f"{error}: there may be more"
    parts = identity.manifest.identity if identity.manifest is not None else {}
    last = None if used is None else datetime.datetime.fromtimestamp(used, datetime.timezone.utc)
    return {
        "root": root,
        "path": str(identity.path),
        "name": identity.name,
        "cache": identity.name.rpartition(".")[0] or identity.name,
        "model": parts.get("model_identity") or parts.get("model_path"),
        "namespace": parts.get("namespace"),
        "pool": parts.get("pool"),
        "dtype": parts.get("dtype"),
        "layout": parts.get("layout"),
        "page_size": parts.get("page_size"),
        "tp": _of(parts, "tp"),
        "pp": _of(parts, "pp"),
        "pages": pages,
        "bytes": size,
        "last_used": None if last is None else last.isoformat(timespec="seconds"),
        "problem": problem,
    }


def _of(parts: dict[str, Any], kind: str) -> str | None:
    size = parts.get(f"{kind}_size", 1)
    rank = parts.get(f"{kind}_rank")
    if size == 1:
        return None
    return f"all/{size}" if rank is None else f"{rank}/{size}"


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    ranks = [f"{kind} {each[kind]}" for kind in ("tp", "pp") if each[kind]]
    return (
        each["pool"] or "?",
        each["dtype"] or "?",
        each["layout"] or "?",
        ", ".join(ranks) or "-",
        f"{each['pages']:,}",
        output.amount(each["bytes"]),
        each["last_used"][:16].replace("T", " ") if each["last_used"] else "never",
    )
