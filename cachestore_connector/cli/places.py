"""Which directories of blocks a subcommand is about."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from .. import config as settings
from .._config_file import read_config_file

_HELP = "A directory of blocks (an entry of storage_backends); may be given several times."


def options(function: Callable) -> Callable:
    """Add ``--store DIR...`` and ``--config FILE``, for `roots`."""
    function = click.option(
        "--config",
        "config_path",
        metavar="FILE",
        help="The server's YAML or JSON settings; without it and --store, what CACHESTORE_CONFIG "
        "names, or the defaults.",
    )(function)
    return click.option("--store", "stores", multiple=True, metavar="DIR", help=_HELP)(function)


def load_config(config_path: str | None) -> settings.Config:
    """The settings of a file, or those in force. Raises `ConfigError`."""
    if config_path is None:
        return settings.load()
    path = os.path.expanduser(config_path)
    read_config_file("--config", path)  # names the option, where the file can't be used
    return settings.load(None, {**os.environ, settings.CONFIG_VARIABLE: path})


def roots(stores: tuple[str, ...], config_path: str | None) -> list[str]:
    """The directories, absolute, each once. Raises `ConfigError` for settings that can't be used.

    That a directory isn't there is for the subcommand to say.
    """
    if stores and config_path is not None:
        raise click.UsageError("give --store or --config, not both")
    found = stores or load_config(config_path).storage_backends
    return list(dict.fromkeys(os.path.abspath(os.path.expanduser(path)) for path in found))
