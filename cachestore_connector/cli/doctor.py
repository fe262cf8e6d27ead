"""`cachestore doctor`: what users get wrong, and what to do about it."""

from __future__ import annotations

import collections
import dataclasses
import textwrap

import click
from rich.text import Text

from . import (
    doctor_config,
    doctor_directories,
    doctor_left_over,
    doctor_memory,
    doctor_sglang,
    output,
)
from .doctor_finding import Finding, Level

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@output.command()
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help="The server's YAML or JSON settings; without it, what CACHESTORE_CONFIG names, or the "
    "defaults.",
)
@click.option("--no-sglang", is_flag=True, help="Leave SGLang out, which takes seconds to import.")
def doctor(out: output.Output, config_path: str | None, no_sglang: bool) -> output.Status | None:
    """Check the settings, directories, memory, limits and SGLang of this host.

    Run it as the user, and in the container, that the server runs in. Nothing is changed. The exit
    status is 1 if anything FAILs, 0 if not.
    """
    found: list[Finding] = []

    def say(more: list[Finding]) -> None:
        for finding in more:
            found.append(finding)
            _say(out, finding)

    config, findings = doctor_config.load(config_path)
    say(findings)
    if config is not None:
        say([doctor_config.pipeline(config), doctor_config.eviction(config)])
        say(doctor_directories.checks(config))
        say(doctor_memory.buffer(config))
        if doctor_config.uses_cache(config) and config.share_buffer_enable:
            say(doctor_left_over.segments(config.cache_buffer_directory))
        say([doctor_memory.locked_memory(), doctor_memory.open_files(config)])
        say([doctor_memory.file_size()])
        say(doctor_memory.numa(config))
        say([doctor_memory.huge_pages(config)])
    say([doctor_sglang.native(), doctor_sglang.entry_point()] if no_sglang else [])
    if not no_sglang:
        say(doctor_sglang.checks())

    count = collections.Counter(each.level for each in found)
    out.line()
    out.line(", ".join(f"{count[level]} {level.value}" for level in Level))
    out.result(
        {
            "findings": [dataclasses.asdict(each) for each in found],
            "count": {level.value: count[level] for level in Level},
        }
    )
    return output.Status.FOUND if count[Level.FAIL] else output.Status.OK


def _say(out: output.Output, finding: Finding) -> None:
    lines = _wrapped(finding, min(out.console.width, 100))
    first = Text(lines[0])
    first.stylize(_STYLES[finding.level], 0, 4)
    out.line(first)
    for line in lines[1:]:
        out.line(line)


def _wrapped(finding: Finding, width: int) -> list[str]:
    """At most ``width`` columns a line, but for a path that is longer."""

    def fill(text: str, first: str, rest: str) -> list[str]:
        return textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )

    lines = fill(f"{finding.check}: {finding.what}", f"{finding.level.value:<4}  ", " " * 6)
    if finding.do:
        lines += fill(finding.do, "      -> ", " " * 9)
    return lines
