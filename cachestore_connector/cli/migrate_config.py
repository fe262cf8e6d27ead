"""`cachestore migrate-config`: from a UCM configuration to ours."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import textwrap

import click

from .. import ucm_settings
from ..errors import ConfigError
from . import output


@output.command("migrate-config")
@click.argument("file", metavar="FILE")
@click.option("-o", "--output", "target", metavar="OUT", help="Write to OUT, not to the terminal.")
@click.option("--force", is_flag=True, help="Overwrite OUT if it is there.")
def migrate_config(
    out: output.Output, file: str, target: str | None, force: bool
) -> output.Status | None:
    """Turn FILE, a UCM configuration for SGLang (YAML or JSON), into settings of CacheStore.

    Keys without a counterpart become comments that say why. The exit status is 1 if one of them
    wants attention: a value that can't be had, or a key that isn't known.
    """
    path = os.path.expanduser(file)
    try:
        with open(path, encoding="utf-8-sig") as opened:
            text = opened.read()
    except UnicodeDecodeError as error:
        raise ConfigError("FILE", path, "a text in UTF-8", hint=str(error)) from None
    migration = ucm_settings.migrate(text, path)
    made = ucm_settings.text_of(migration, path)
    if target is not None:
        target = os.path.expanduser(target)
        _write(path, target, made, force)
        out.line(f"{target}: {len(migration.given)} settings from {path}")
        for note in migration.notes:
            where = f"line {note.line}, " if note.line else ""
            said = f"not carried over: {where}{note.key}: {note.text}"
            for line in textwrap.wrap(said, out.console.width, subsequent_indent="  "):
                out.line(line)
    else:
        out.line(made.rstrip("\n"))
    out.result(
        {
            "settings": migration.given,
            "notes": [dataclasses.asdict(note) for note in migration.notes],
            "yaml": made,
            "written": target,
        }
    )
    if any(note.wants_attention for note in migration.notes):
        return output.Status.FOUND
    return output.Status.OK


def _write(source: str, target: str, text: str, force: bool) -> None:
    """All of it or nothing; never over a file that is there, unless by ``force``."""
    if os.path.exists(target) and os.path.samefile(source, target):
        raise ConfigError("OUT", target, "another file than the one that is read")
    name = f"{target}.{os.getpid()}.part" if force else target
    try:
        number = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        hint = "it is there; --force overwrites it"
        raise ConfigError("OUT", target, "a file that isn't there yet", hint=hint) from None
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
