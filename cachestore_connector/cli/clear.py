"""`cachestore clear`: forget the blocks of a cache."""

from __future__ import annotations

import click

from .. import clearing, disk_usage, instances, on_disk
from ..errors import CacheStoreError
from . import output, places

_OPEN = {True: "yes", False: "no", None: "?"}


class NoSuchCacheError(CacheStoreError, LookupError):
    """No directory has the name that was given."""


@output.command()
@places.options
@click.option(
    "--identity",
    "names",
    multiple=True,
    required=True,
    metavar="NAME|all",
    help="What to clear: a cache as `cachestore ls` names it (all its pools and ranks), the whole "
    "name of a directory, or all; may be given several times.",
)
@output.asking
def clear(
    out: output.Output,
    stores: tuple[str, ...],
    config_path: str | None,
    names: tuple[str, ...],
    dry_run: bool,
    yes: bool,
) -> output.Status:
    """Remove all blocks of a cache, beside running servers too.

    Lists it first and asks. Servers that have it open notice with their next request; what they
    accepted for storing before isn't there afterwards, nor what their shared buffers hold.
    """
    roots = places.roots(stores, config_path)
    if not dry_run:
        out.must_be_able_to_ask(yes)
    chosen = _chosen(roots, names)
    before = [disk_usage.of(each.path / on_disk.BLOCKS) for each in chosen]
    opened = [instances.is_open(each.path) for each in chosen]
    rows = [
        (each.name, f"{usage.files:,}", output.amount(usage.allocated), _OPEN[is_open])
        for each, usage, is_open in zip(chosen, before, opened, strict=True)
    ]
    out.table(
        ("directory", "blocks", "allocated", "open"), rows, "blocks,allocated", whole="directory"
    )
    total = sum(usage.allocated for usage in before)
    cleared: list[str] = []
    failed: list[tuple[str, str]] = []
    if dry_run:
        out.line("nothing was cleared")
    elif not chosen:
        out.line("nothing is stored there")
    elif out.agreed(f"Remove all these blocks ({output.amount(total)})?", yes):
        for each in chosen:
            try:
                clearing.clear(each.path)
                cleared.append(str(each.path))
                clearing.remove_trash(each.path)
            except OSError as error:
                failed.append((str(each.path), str(error)))
        for path, problem in failed:
            out.line(f"failed: {path}: {problem}")
        out.line(f"{len(cleared):,} cleared")
    out.result(
        {
            "stores": roots,
            "identities": [
                {
                    "path": str(each.path),
                    "blocks": usage.files,
                    "bytes": usage.size,
                    "allocated": usage.allocated,
                    "open": is_open,
                }
                for each, usage, is_open in zip(chosen, before, opened, strict=True)
            ],
            "cleared": cleared,
            "failed": [{"path": path, "problem": problem} for path, problem in failed],
            "dry_run": dry_run,
        }
    )
    return output.Status.FAILED if failed else output.Status.OK


def _chosen(roots: list[str], names: tuple[str, ...]) -> list[on_disk.StoredIdentity]:
    every = [identity for root in roots for identity in on_disk.identities(root)]
    if "all" in names:
        return every
    found = []
    for name in names:
        matching = [each for each in every if name in (each.name, each.name.rpartition(".")[0])]
        if not matching:
            there = sorted({each.name.rpartition(".")[0] or each.name for each in every})
            raise NoSuchCacheError(
                f"nothing there is called {name!r}; there is {', '.join(there) or 'nothing'}"
            )
        found += [each for each in matching if each not in found]
    return found
