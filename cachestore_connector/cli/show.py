"""`cachestore show`: all that is stored of one page."""

from __future__ import annotations

import dataclasses
import datetime
import re
from pathlib import Path
from typing import Any

import click

from .. import identity as identities
from .. import on_disk
from ..block_check import Checked, Checker, Record, State
from . import output, places

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RANKS = ("tp", "pp", "attn_cp", "dcp")


@output.command()
@click.argument("key")
@places.options
def show(
    out: output.Output, key: str, stores: tuple[str, ...], config_path: str | None
) -> output.Status:
    """Say where a page is, part by part, and whether each part is right.

    KEY is SGLang's page key (64 hex digits), a block id (32), or the path of a block file. A page
    has a part in the directory of each rank and pool that holds other bytes; of a pool with
    windows, not every page has one. Exit status 1 if nothing is stored, or something isn't right.
    """
    wanted, roots = _wanted(key, stores, config_path)
    checker = Checker()
    found = [(root, identity) for root in roots for identity in on_disk.identities(root)]
    parts, unsure = [], []
    for root, identity in found:
        block_id = _block_id(identity, wanted)
        if block_id is None:
            unsure.append({"path": str(identity.path), "problem": identity.problem})
        else:
            parts.append(_described(root, identity, block_id, checker))
    stored = [part for part in parts if part["state"] != "absent"]
    # Of several directories a block lies in one; of a cache that has it somewhere, the other
    # identities are said to lack it.
    has = {(part["identity"], part["block_id"]) for part in stored}
    families = {(part["family"], part["block_id"]) for part in stored}
    absent: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts:
        name = (part["identity"], part["block_id"])
        if name not in has and (part["family"], part["block_id"]) in families:
            absent.setdefault(name, part)
    shown = stored + list(absent.values())
    if stored:
        _show(out, shown)
    else:
        out.line("nothing of that page is stored")
    for each in unsure:
        out.line(f"not looked at: {each['path']}: {each['problem']}")
    out.result({"parts": shown, "not_looked_at": unsure})
    right = stored and all(part["state"] == State.RIGHT.value for part in stored)
    return output.Status.OK if right else output.Status.FOUND


def _wanted(key: str, stores: tuple[str, ...], config_path: str | None) -> tuple[str, list[str]]:
    """A page key or block id, and the directories to look for it in."""
    digits = key.lower()
    if re.fullmatch("[0-9a-f]{64}|[0-9a-f]{32}", digits):
        return digits, places.roots(stores, config_path)
    path = Path(key).expanduser().absolute()
    if len(path.parents) < 5 or not re.fullmatch("[0-9a-f]{32}", path.name):
        raise click.BadParameter(
            f"{key!r} is neither 64 hex digits (a page key), nor 32 (a block id), nor the path of "
            "a block file",
            param_hint="KEY",
        )
    if stores or config_path is not None:
        return path.name, places.roots(stores, config_path)
    return path.name, [str(path.parents[3])]  # <root>/<identity>/blocks/abc/abc...


def _block_id(identity: on_disk.StoredIdentity, wanted: str) -> str | None:
    """The page's in this identity; None where its family isn't known."""
    if len(wanted) == 32:
        return wanted
    family = identity.manifest and identity.manifest.identity.get("family")
    return identities.block_id(family, wanted).hex() if family else None


def _described(
    root: str, identity: on_disk.StoredIdentity, block_id: str, checker: Checker
) -> dict[str, Any]:
    parts = identity.manifest.identity if identity.manifest is not None else {}
    path = identity.path / on_disk.BLOCKS / block_id[:3] / block_id
    checked = checker.check(path, identity.manifest)
    used = None
    if checked.state is not State.GONE:
        try:
            used = datetime.datetime.fromtimestamp(path.lstat().st_mtime, datetime.timezone.utc)
        except FileNotFoundError:
            checked = dataclasses.replace(checked, state=State.GONE)
        except OSError:
            pass  # said by its state
    return {
        "root": root,
        "identity": identity.name,
        "family": parts.get("family") or identity.name.rpartition(".")[0],
        "block_id": path.name,
        "path": str(path),
        "pool": parts.get("pool"),
        "ranks": _ranks(parts),
        "state": "absent" if checked.state is State.GONE else checked.state.value,
        "problem": checked.problem,
        "bytes": checked.size,
        "last_used": None if used is None else used.isoformat(timespec="seconds"),
        "record": None if checked.record is None else _record(checked, checked.record),
    }


def _ranks(parts: Any) -> dict[str, str]:
    ranks = {}
    for kind in _RANKS:
        size, rank = parts.get(f"{kind}_size", 1), parts.get(f"{kind}_rank")
        if size > 1:
            ranks[kind] = f"{'all' if rank is None else rank}/{size}"
    return ranks


def _record(checked: Checked, record: Record) -> dict[str, Any]:
    tensors = len(record.tensor_sizes)
    unchecked = checked.state is not State.RIGHT and not checked.wrong
    return {
        "version": record.version,
        "fingerprint": record.fingerprint.hex(),
        "block_id": record.block_id.hex(),
        "boot_id": record.boot_id.hex(),
        "this_boot": record.boot_id.hex() == _this_boot(),
        "payload": record.payload,
        "stride": record.stride,
        "shards": record.shards,
        "tensors": [
            {
                "shard": number // tensors,
                "tensor": number % tensors,
                "bytes": record.tensor_sizes[number % tensors],
                "crc32c": f"{checksum:08x}",
                "right": None if unchecked else number not in checked.wrong,
            }
            for number, checksum in enumerate(record.checksums)
        ],
    }


def _this_boot() -> str:
    try:
        return _BOOT_ID.read_text().strip().replace("-", "")
    except OSError:
        return ""


def _show(out: output.Output, parts: list[dict[str, Any]]) -> None:
    caches: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        name = part["identity"]
        caches.setdefault(name.rpartition(".")[0] or name, []).append(part)
    for cache, members in sorted(caches.items()):
        out.line(cache)
        _show_cache(out, members)


def _show_cache(out: output.Output, parts: list[dict[str, Any]]) -> None:
    rows = []
    for part in parts:
        ranks = ", ".join(f"{kind} {rank}" for kind, rank in part["ranks"].items())
        there = part["state"] != "absent"
        size = output.amount(part["bytes"]) if there else "-"
        rows.append(
            (part["pool"] or "?", ranks or "-", size, part["last_used"] or "-", part["state"])
        )
    out.table(("pool", "rank", "size", "last used", "state"), rows, right="size")
    for part in parts:
        if part["state"] == "absent":
            continue
        out.line(part["path"])
        if part["problem"]:
            out.line(f"    {part['state']}: {part['problem']}")
        record = part["record"]
        if record is None:
            continue
        sizes = sorted({each["bytes"] for each in record["tensors"]})
        each_size = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
        tensors = record["tensors"]
        sums = {True: "right", None: "not looked at"}.get(
            None
            if any(each["right"] is None for each in tensors)
            else all(each["right"] for each in tensors),
            f"{sum(not each['right'] for each in tensors):,} wrong",
        )
        boot = "in this boot" if record["this_boot"] else "in another boot or on another host"
        out.line(
            f"    record version {record['version']}, written {boot}; payload "
            f"{record['payload']:,} bytes in {len(tensors):,} tensors of {each_size}; "
            f"checksums {sums}"
        )
