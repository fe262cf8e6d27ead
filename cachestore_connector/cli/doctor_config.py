"""`cachestore doctor`: whether the settings can be used, and what is unwise in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .. import config as settings
from .._config_file import read_config_file
from ..errors import ConfigError
from .doctor_finding import Finding, fail, ok, warn

_SETTINGS_PAGE = "docs/settings.md has every setting with what is allowed"


def load(
    config_path: str | None, environ: Mapping[str, str] = os.environ
) -> tuple[settings.Config | None, list[Finding]]:
    """The settings, and what is wrong with them: every key of a file, not the first alone.

    With wrong keys in it, those that are right, so that the rest can be checked; None if nothing
    can be made of it.
    """
    path, option = config_path, "--config"
    if path is None:
        path, option = environ.get(settings.CONFIG_VARIABLE) or None, settings.CONFIG_VARIABLE
    if path is None:
        return _load_defaults(environ)
    path = os.path.expanduser(path)
    try:
        given, lines = read_config_file(option, path)
    except ConfigError as error:
        is_there = os.path.isfile(path) and os.access(path, os.R_OK)
        what = f"correct it where it says; {_SETTINGS_PAGE}"
        return None, [
            fail("config", str(error), what if is_there else f"give {option} a file that is there")
        ]
    bare = {key: value for key, value in environ.items() if key != settings.CONFIG_VARIABLE}
    wrong = {key: problem for key in given if (problem := _problem(key, given[key], bare))}
    found = [_wrong(path, lines.get(key, ""), problem) for key, problem in wrong.items()]
    right = {key: value for key, value in given.items() if key not in wrong}
    try:
        config = settings.load(right, bare)
    except ConfigError as error:
        # Of several settings together: each by itself is right.
        found.append(_wrong(path, lines.get(error.key, ""), error))
        return None, found
    if not found:
        found = [ok("config", f"{path}: {len(given)} settings, all of them right")]
    return config, found


def _load_defaults(environ: Mapping[str, str]) -> tuple[settings.Config | None, list[Finding]]:
    try:
        config = settings.load(None, environ)
    except ConfigError as error:
        return None, [fail("config", str(error), "set HOME, or storage_backends in a file")]
    return config, [
        ok(
            "config",
            f"neither --config nor {settings.CONFIG_VARIABLE} names a file: the defaults are "
            "looked at. What SGLang gets with --hicache-storage-backend-extra-config isn't known "
            "here: give that file as --config",
        )
    ]


def _problem(key: Any, value: Any, environ: Mapping[str, str]) -> ConfigError | None:
    """What is wrong with one setting by itself."""
    try:
        if key not in settings.SETTINGS:
            settings.load({key: value}, environ)
        elif value is not None:
            row = settings.SETTINGS[key]
            row.metadata["kind"].parse(key, value, row.metadata["unit"], environ)
    except ConfigError as error:
        return error
    return None


def _wrong(path: str, line: str, error: ConfigError) -> Finding:
    located = ConfigError(
        error.key, error.value, error.allowed, source=f"{path}{line}", hint=error.hint
    )
    return fail("config", str(located), f"change it; {_SETTINGS_PAGE}")


def pipeline(config: settings.Config) -> Finding:
    """Which pipeline models get."""
    chosen = {}
    for is_mla in (True, False):
        try:
            chosen[is_mla] = settings.choose_pipeline(config, is_mla)[0]
        except ConfigError as error:
            return fail("pipeline", str(error), "leave cache_use_host_buffer out")
    if config.store_pipeline is not None:
        return ok("pipeline", f"{config.store_pipeline}, by store_pipeline, for every model")
    return ok("pipeline", f"{chosen[True]} for MLA models, {chosen[False]} for all others")


def eviction(config: settings.Config) -> Finding:
    """Whether anything stops the disk from filling up."""
    if config.posix_capacity_gb is None and not config.posix_free_space_reserve_gb:
        return warn(
            "eviction",
            "nothing is evicted: blocks are stored until the disk is full",
            "set posix_capacity_gb, and the same on every host that shares the directories",
        )
    limits = []
    if config.posix_capacity_gb is not None:
        given = config.posix_capacity_gb
        each = given if isinstance(given, tuple) else (given,)
        limits.append(f"{' + '.join(f'{gib:g}' for gib in each)} GiB of blocks")
    if config.posix_free_space_reserve_gb:
        limits.append(f"{config.posix_free_space_reserve_gb:g} GiB kept free")
    return ok("eviction", ", ".join(limits))


def uses_cache(config: settings.Config) -> bool:
    """Whether some model gets a cache buffer."""
    return config.store_pipeline in (None, settings.CACHE_POSIX)
