"""`cachestore verify`: is every block what was stored."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich import progress

from .. import on_disk, verification
from ..block_check import Checked, Checker, State
from . import output, places

_SHOWN = 20  # damaged blocks that are listed for people
_SAVE_SECONDS = 2.0


@output.command()
@places.options
@click.option("--repair", is_flag=True, help="Remove damaged blocks, once they have been listed.")
@click.option("--yes", is_flag=True, help="With --repair: don't ask.")
@click.option("--resume", is_flag=True, help="Go on where a run that was interrupted has ended.")
@click.option(
    "--state",
    "state_path",
    metavar="FILE",
    help="Where a run keeps how far it got, for --resume; otherwise "
    f"{verification.STATE_NAME} in the (first) directory.",
)
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option(
    "--rate-limit",
    type=click.FloatRange(0, min_open=True),
    metavar="MB",
    help="MB to read a second.",
)
def verify(
    out: output.Output,
    stores: tuple[str, ...],
    config_path: str | None,
    repair: bool,
    yes: bool,
    resume: bool,
    state_path: str | None,
    threads: int,
    rate_limit: float | None,
) -> output.Status:
    """Read and check every block: its record, and the checksum of each tensor.

    Safe beside running servers: what is evicted, cleared or replaced meanwhile is no damage. Memory
    is bounded, and the page cache left alone where the file system has O_DIRECT. Exit status 1 if a
    block is damaged or can't be read, repaired or not.
    """
    roots = places.roots(stores, config_path)
    if repair:
        out.must_be_able_to_ask(yes)
    state = Path(state_path or Path(roots[0], verification.STATE_NAME))
    identities = [
        (number, identity)
        for number, root in enumerate(roots)
        for identity in on_disk.identities(root)
    ]
    tally = (verification.load(state, roots) if resume else None) or verification.Tally()
    if resume and tally.position is not None:
        out.line(f"going on after {output.count(tally.blocks, 'block')}")
    run = _Run(out, tally, state, roots)
    checker = Checker(rate_limit * 1e6 if rate_limit else None)
    with _bar(out, identities, tally) as advance:
        interrupted = run.go(verification.run(checker, identities, tally, threads), advance)
    run.say(identities)
    removed, failed = [], []
    if repair and not interrupted and tally.damaged:
        number = len(tally.damaged)
        if out.agreed(f"Remove {number} damaged block{'s' * (number > 1)}?", yes):
            removed, failed = _repair(out, identities, tally)
    run.end(interrupted)
    out.result(run.result(interrupted, removed, failed))
    if interrupted or failed:
        return output.Status.FAILED
    if tally.damaged or tally.unreadable:
        return output.Status.FOUND
    return output.Status.FAILED if run.troubles else output.Status.OK


class _Run:
    """One run: keeps its state, and says what it found."""

    def __init__(
        self, out: output.Output, tally: verification.Tally, state: Path, roots: list[str]
    ) -> None:
        self._out, self._tally, self._state, self._roots = out, tally, state, roots
        self._keeps = True
        self._begun = time.monotonic()
        self._size_before = tally.size
        self.troubles: list[verification.Trouble] = []

    def go(self, found: Iterator[Checked | verification.Trouble], advance: Any) -> bool:
        """Check until the end; whether it was interrupted."""
        saved = time.monotonic()
        try:
            for each in found:
                if isinstance(each, verification.Trouble):
                    self.troubles.append(each)
                    continue
                advance(each.size)
                if time.monotonic() - saved >= _SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            found.close()  # type: ignore[attr-defined]
            self._save()
            return True
        return False

    def end(self, interrupted: bool) -> None:
        """Say how to go on, or forget the state."""
        if not interrupted:
            with contextlib.suppress(OSError):
                self._state.unlink(missing_ok=True)
        elif self._keeps:
            self._out.line(f"interrupted; --resume goes on (state: {self._state})")
        else:
            self._out.line("interrupted")

    def _save(self) -> None:
        if not self._keeps:
            return
        try:
            verification.save(self._state, self._tally, self._roots)
        except OSError as error:
            self._keeps = False
            click.echo(
                f"cachestore: this run can't be resumed: {self._state}: {error.strerror} "
                "(--state names another file)",
                err=True,
            )

    def say(self, identities: list[tuple[int, on_disk.StoredIdentity]]) -> None:
        """What was found, for people."""
        out, tally = self._out, self._tally
        for kind, found in (("damaged", tally.damaged), ("can't be read", tally.unreadable)):
            for path, problem in found[:_SHOWN]:
                out.line(f"{kind}: {path}: {problem}")
            if len(found) > _SHOWN:
                out.line(f"... and {len(found) - _SHOWN:,} more: --json lists all")
        for trouble in self.troubles:
            out.line(f"not checked: {trouble.path}: {trouble.problem}")
        for _, identity in identities:
            if identity.problem:
                out.line(f"checked without its manifest: {identity.path}: {identity.problem}")
        if tally.unknown:
            unknown = output.count(tally.unknown, "block")
            out.line(f"{unknown} of another version can't be checked by this one")
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rate = (tally.size - self._size_before) / seconds
        out.line(
            f"{output.count(tally.blocks, 'block')}, {output.amount(tally.size)} read at "
            f"{output.amount(rate)}/s: {len(tally.damaged):,} damaged, "
            f"{len(tally.unreadable):,} unreadable"
        )

    def result(self, interrupted: bool, removed: list[str], failed: list[str]) -> dict[str, Any]:
        """The same as JSON."""
        tally = self._tally
        return {
            "stores": self._roots,
            "blocks": tally.blocks,
            "bytes": tally.size,
            "gone": tally.gone,
            "unknown_version": tally.unknown,
            "damaged": [{"path": path, "problem": what} for path, what in tally.damaged],
            "unreadable": [{"path": path, "problem": what} for path, what in tally.unreadable],
            "not_checked": [{"path": each.path, "problem": each.problem} for each in self.troubles],
            "removed": removed,
            "not_removed": failed,
            "interrupted": interrupted,
            "state": str(self._state) if interrupted and self._keeps else None,
        }


def _repair(
    out: output.Output,
    identities: list[tuple[int, on_disk.StoredIdentity]],
    tally: verification.Tally,
) -> tuple[list[str], list[str]]:
    """Remove what is still damaged; the paths of what was removed, and of what couldn't be."""
    described = {str(identity.path): identity.manifest for _, identity in identities}
    checker = Checker()
    removed, failed = [], []
    for path, _ in tally.damaged:
        try:
            checked = checker.remove_damaged(Path(path), described.get(str(Path(path).parents[2])))
        except OSError as error:
            out.line(f"not removed: {path}: {error.strerror}")
            failed.append(path)
            continue
        if checked.state is State.DAMAGED:
            removed.append(path)
    out.line(f"{len(removed):,} removed")
    if len(removed) + len(failed) < len(tally.damaged):
        out.line("the others were removed or replaced by somebody else meanwhile")
    return removed, failed


@contextlib.contextmanager
def _bar(
    out: output.Output,
    identities: list[tuple[int, on_disk.StoredIdentity]],
    tally: verification.Tally,
) -> Iterator[Any]:
    """Shows how far it is, with rate and time left, on a terminal; a function of bytes read."""
    if out.as_json or not out.progress.is_terminal:
        yield lambda size: None
        return
    total = 0
    for _, identity in identities:
        with contextlib.suppress(OSError):
            total += sum(block.size for block in on_disk.blocks(identity))
    columns = (
        progress.BarColumn(bar_width=20),
        progress.TaskProgressColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=out.progress, transient=True) as bar:
        task = bar.add_task("", total=total, completed=tally.size)
        yield lambda size: bar.advance(task, size)
