"""Which directories of blocks a subcommand is about."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from .. import config as settings
from .._config_file import read_config_file
from ..errors import CacheStoreError

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


class NoStoreError(CacheStoreError):
    """A directory that is to be looked at isn't one, or not this user's to read."""


def roots(stores: tuple[str, ...], config_path: str | None) -> list[str]:
    """The directories, absolute, each once, all of which can be listed.

    Raises `ConfigError` for settings that can't be used, and `NoStoreError`.
    """
    if stores and config_path is not None:
        raise click.UsageError("give --store or --config, not both")
    return either(stores, config_path)


def either(stores: tuple[str, ...], config_path: str | None) -> list[str]:
    """As `roots`, where ``--config`` is for other settings too, and ``--store`` goes before it."""
    found, origin = stores, "--store"
    if not stores:
        found = load_config(config_path).storage_backends
        path = config_path or os.environ.get(settings.CONFIG_VARIABLE)
        origin = f"storage_backends of {path}" if path else "the default"
    paths = list(dict.fromkeys(os.path.abspath(os.path.expanduser(path)) for path in found))
    for path in paths:
        _require(path, origin)
    return paths


def _require(path: str, origin: str) -> None:
    named = f"{path} ({origin})"
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        raise NoStoreError(
            f"{named} isn't there: nothing was stored there yet, or give the right one as --store "
            "DIR, or the server's settings as --config FILE"
        ) from None
    except NotADirectoryError:
        raise NoStoreError(f"{named} is not a directory: name another one") from None
    except PermissionError:
        raise NoStoreError(
            f"{named}: Permission denied: run this as the user that the server runs as"
        ) from None
