"""The `cachestore` command: what is on the disks, is it healthy, does it help.

Each subcommand is a module of this package, imported when it is asked for. None needs sglang or
torch, unless its help says so.
"""

from __future__ import annotations

import importlib

import click

# Subcommands and what the list of them says; each is a module here with a function of that name,
# or of that name and `_command`.
COMMANDS: dict[str, str] = {
    "doctor": "what is wrong with the settings, disks, memory and SGLang of this host",
    "ls": "the caches in a store: model, pages, bytes, last use",
    "du": "what takes the space: bytes, files, inodes, and what is free",
    "show": "all that is stored of one page, and whether it is right",
    "verify": "read and check every block; --repair removes damaged ones",
    "gc": "remove what stores that are gone have left",
    "clear": "forget the blocks of a cache",
    "top": "a live view of the backends attached on this host",
    "bench": "what this machine's disk and memory give, and when restoring pays",
    "migrate-config": "from a UCM configuration to settings of CacheStore",
}


class _Commands(click.Group):
    """Imports a subcommand's module when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        word = name.replace("-", "_")
        module = importlib.import_module(f".{word}", __name__)
        command = getattr(module, f"{word}_command", None) or getattr(module, word)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0, all is well; 1, something was found that wants attention; 2, the "
    "command line is wrong; 3, it could not be done.",
)
@click.version_option(package_name="cachestore", message="cachestore %(version)s")
def main() -> None:
    """Look after CacheStore's directories and running stores on this host."""
