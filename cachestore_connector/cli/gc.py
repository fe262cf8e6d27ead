"""`cachestore gc`: remove what stores that are gone have left."""

from __future__ import annotations

from pathlib import Path

from .. import leftovers
from . import output, places


@output.command()
@places.options
@output.asking
def gc(
    out: output.Output,
    stores: tuple[str, ...],
    config_path: str | None,
    dry_run: bool,
    yes: bool,
) -> output.Status:
    """Remove what stores that are gone have left.

    That is their temporary files, cleared blocks, and caches of older versions or without blocks.
    Lists it first and asks. Safe beside running servers: what any store has open stays, as its
    locks say.
    """
    roots = places.roots(stores, config_path)
    if not dry_run:
        out.must_be_able_to_ask(yes)
    left: list[leftovers.Leftover] = []
    passed_by: list[tuple[Path, str]] = []
    for root in roots:
        found = leftovers.find(root)
        left += found.leftovers
        passed_by += found.passed_by
    _list(out, left)
    for path, why in passed_by:
        out.line(f"stays: {path}: {why}")
    removed: list[leftovers.Leftover] = []
    kept: list[tuple[Path, str]] = []
    failed = False
    taken = sum(each.usage.allocated for each in left)
    if left and not dry_run and out.agreed(f"Remove this ({output.amount(taken)})?", yes):
        for each in left:
            try:
                why = leftovers.remove(each)
            except OSError as error:
                why, failed = error.strerror or str(error), True
            if why:
                kept.append((each.path, why))
                out.line(f"not removed: {each.path}: {why}")
            else:
                removed.append(each)
        freed = sum(each.usage.allocated for each in removed)
        out.line(f"{len(removed):,} removed, {output.amount(freed)}")
    elif not left:
        out.line("nothing to remove")
    out.result(
        {
            "stores": roots,
            "found": [_described(each) for each in left],
            "removed": [str(each.path) for each in removed],
            "not_removed": [{"path": str(path), "problem": why} for path, why in kept],
            "stays": [{"path": str(path), "problem": why} for path, why in passed_by],
            "dry_run": dry_run,
        }
    )
    return output.Status.FAILED if failed else output.Status.OK


def _list(out: output.Output, left: list[leftovers.Leftover]) -> None:
    for each in left:
        out.line(f"{each.path}")
        why = f" ({each.why})" if each.why else ""
        out.line(
            f"    {each.kind.value}{why}: {output.count(each.usage.files, 'file')}, "
            f"{output.amount(each.usage.allocated)}"
        )


def _described(each: leftovers.Leftover) -> dict[str, object]:
    return {
        "path": str(each.path),
        "kind": each.kind.name.lower(),
        "why": each.why,
        "files": each.usage.files,
        "inodes": each.usage.inodes,
        "bytes": each.usage.size,
        "allocated": each.usage.allocated,
    }
