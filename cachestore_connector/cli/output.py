"""What every subcommand has in common: ``--json``, colours, tables, errors and exit statuses.

A person's terminal gets colours and tables as wide as it is; a pipe gets plain text of the same
words, 80 columns unless ``COLUMNS`` says otherwise. With ``--json`` standard output is one JSON
value and nothing else. Progress and errors go to standard error.
"""

from __future__ import annotations

import enum
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import CacheStoreError


class Status(enum.IntEnum):
    """Exit statuses. 2 is click's own: the command line is wrong."""

    OK = 0
    FOUND = 1  # something that wants attention
    FAILED = 3  # it could not be done


class NobodyToAskError(CacheStoreError):
    """Standard input is no terminal, or JSON is wanted, and there was no ``--yes``."""


class Output:
    """Where a subcommand says what it found: to people, or as JSON."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, soft_wrap=False, emoji=False, markup=False)
        self.progress = Console(stderr=True, highlight=False, emoji=False, markup=False)

    def line(self, text: str | Text = "") -> None:
        """A line for people."""
        if not self.as_json:
            self.console.print(text, soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str | Text]],
        right: str = "",
        whole: str = "",
    ) -> None:
        """A table for people. ``columns``: their headings. ``right``: those aligned right.

        ``whole``: the column of names that are typed elsewhere: they aren't broken, and where they
        are too long, lines are longer than the terminal is wide.
        """
        if self.as_json:
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            justify = "right" if column in right.split(",") else "left"
            table.add_column(column, justify=justify, overflow="fold", no_wrap=column == whole)
        for row in rows:
            table.add_row(*row)
        self.console.print(table, width=self._width_of(table), crop=False)

    def groups(
        self,
        columns: Sequence[str],
        groups: Iterable[tuple[str, Sequence[Sequence[str]]]],
        right: str = "",
    ) -> None:
        """A table for people of (title, rows): each title on its own line. Nothing is broken."""
        if self.as_json:
            return
        table = Table(box=None, pad_edge=False, show_header=False)
        for column in columns:
            justify = "right" if column in right.split(",") else "left"
            table.add_column(justify=justify, no_wrap=True)
        table.add_row(f"  {columns[0]}", *columns[1:])
        titles: dict[int, str] = {}
        for title, rows in groups:
            titles[table.row_count] = title
            for first, *others in rows:
                table.add_row(f"  {first}", *others)
        options = self.console.options.update(width=self._width_of(table))
        for number, line in enumerate(self.console.render_lines(table, options, pad=False)):
            if number in titles:
                self.line(titles[number])
            text = "".join(segment.text for segment in line).rstrip()
            self.line(Text(text, style="" if number else "bold"))

    def _width_of(self, table: Table) -> int:
        return max(self.console.width, self.console.measure(table).minimum)

    def must_be_able_to_ask(self, yes: bool) -> None:
        """Raises `NobodyToAskError` where `agreed` could ask nobody, before any work is done."""
        if not yes and (self.as_json or not sys.stdin.isatty()):
            raise NobodyToAskError(
                "there is nobody to ask whether to go on: say --yes, or --dry-run to only list"
            )

    def agreed(self, question: str, yes: bool) -> bool:
        """Whether whoever is at the terminal agrees; ``yes``: they have already."""
        self.must_be_able_to_ask(yes)
        return yes or click.confirm(question, err=True)

    def result(self, value: Any) -> None:
        """What ``--json`` prints; nothing for people."""
        if self.as_json:
            click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def command(*args: Any, **kwargs: Any) -> Callable[[Callable], click.Command]:
    """As `click.command`, for a function ``(out: Output, ...) -> Status | None``.

    Adds ``--json``. What is raised on purpose, and errors of files, are one line and status 3.
    """

    def decorate(function: Callable) -> click.Command:
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
        @functools.wraps(function)
        def run(*, as_json: bool, **given: Any) -> None:
            try:
                status = function(Output(as_json), **given)
            except BrokenPipeError:  # as `| head` does
                sys.stderr.close()
                status = Status.OK
            except (KeyboardInterrupt, click.Abort):
                click.echo("cachestore: interrupted", err=True)
                status = Status.FAILED
            except (CacheStoreError, OSError) as error:
                if as_json:
                    click.echo(json.dumps({"error": str(error)}))
                click.echo(f"cachestore: {error}", err=True)
                status = Status.FAILED
            sys.exit(int(status or 0))

        return click.command(*args, **kwargs)(run)

    return decorate


def asking(function: Callable) -> Callable:
    """Add ``--dry-run`` and ``--yes``, for what lists what it would remove, and asks."""
    function = click.option("--yes", is_flag=True, help="Don't ask.")(function)
    text = "Only list what would be removed."
    return click.option("--dry-run", is_flag=True, help=text)(function)


def count(number: int, noun: str, plural: str = "") -> str:
    """How many of something: ``1 file``, ``1,200 files``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def amount(size: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
