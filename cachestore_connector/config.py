"""Settings: YAML or JSON -> one frozen, validated `Config`, and the choice of the pipeline.

`Config`'s fields are the table of settings (``_settings_table.py``); parsing, error messages and
the shipped ``configs/cachestore.yaml`` (`reference_yaml`) are derived from them.

`load` reads each setting from the first source that gives it: SGLang's
``--hicache-storage-backend-extra-config``, then the YAML or JSON file that the environment
variable ``CACHESTORE_CONFIG`` names, then the default. ``null`` is as good as leaving a key out.

Everything here is pure but for reading that file and the user database (for ``~``), and may be
called from any thread.
"""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ._config_file import read_config_file
from ._settings_table import SETTINGS, Config
from .errors import ConfigError

__all__ = [
    "CACHE_POSIX",
    "CONFIG_VARIABLE",
    "SETTINGS",
    "SGLANG_KEYS",
    "Config",
    "check_geometry",
    "choose_pipeline",
    "load",
    "reference_yaml",
]

CACHE_POSIX = "Cache|Posix"

CONFIG_VARIABLE = "CACHESTORE_CONFIG"

# Keys that SGLang 0.5.23 reads from the same mapping. It pops most of them before a backend sees
# it, but its decode offload pops none, so they are let through here.
# Source: sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller,
# parse_storage_backend_extra_config; managers.cache_controller, _generate_storage_config;
# mem_cache.storage.backend_factory (the last four, of the `dynamic` backend).
SGLANG_KEYS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
    "file_storage_path",
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
)


def load(
    extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> Config:
    """The settings in force.

    ``extra_config``: what SGLang hands over, or None; it isn't changed. ``environ``: where
    ``CACHESTORE_CONFIG``, ``HOME``, ``XDG_CACHE_HOME`` and ``$VAR`` in paths are looked up.
    Raises `ConfigError` for an unknown key, a wrong type, an impossible value, or a
    ``CACHESTORE_CONFIG`` file that can't be used.
    """
    if extra_config is None:
        extra_config = {}
    if not isinstance(extra_config, Mapping):
        raise ConfigError("extra config", extra_config, "a mapping of settings")
    values: dict[str, Any] = {}
    # The later source wins. Both are checked whole: a wrong value that is overridden today
    # comes into force the day the override goes.
    if environ.get(CONFIG_VARIABLE):
        path = os.path.expanduser(environ[CONFIG_VARIABLE])
        given, lines = read_config_file(CONFIG_VARIABLE, path)
        values |= _parse(given, environ, lambda key: f"{path}{lines.get(key, '')}")
    values |= _parse(extra_config, environ, lambda key: "extra config")
    for row in SETTINGS.values():
        if row.name not in values and row.metadata["from_environ"] is not None:
            values[row.name] = row.metadata["from_environ"](environ)
    return Config(**values)


def _parse(
    given: Mapping[Any, Any], environ: Mapping[str, str], source: Callable[[Any], str]
) -> dict[str, Any]:
    """The settings of one source, in their final form; keys that are null are left out."""
    parsed: dict[str, Any] = {}
    for key, value in given.items():
        if key in SGLANG_KEYS:
            continue
        if key not in SETTINGS:
            raise _unknown_key(key, value, source(key))
        if value is None:
            continue
        row = SETTINGS[key]
        try:
            parsed[key] = row.metadata["kind"].parse(key, value, row.metadata["unit"], environ)
        except ConfigError as error:
            raise ConfigError(
                error.key, error.value, error.allowed, source=source(key), hint=error.hint
            ) from None
    return parsed


def _unknown_key(key: Any, value: Any, source: str) -> ConfigError:
    allowed = "one of the settings " + ", ".join(SETTINGS)
    if not isinstance(key, str):
        hint = f"a key must be a string, and this one is of type {type(key).__name__}: quote it"
        return ConfigError(repr(key), value, allowed, source=source, hint=hint)
    near = difflib.get_close_matches(
        key.lower().replace("-", "_"), [*SETTINGS, *SGLANG_KEYS], n=1, cutoff=0.6
    )
    hint = "no such setting" + (f", did you mean {near[0]}?" if near else "")
    return ConfigError(key, value, allowed, source=source, hint=hint)


def choose_pipeline(config: Config, is_mla: bool) -> tuple[str, str]:
    """(pipeline, reason), the reason being one sentence to log once.

    ``is_mla``: whether every tensor-parallel rank holds the same KV. A user's value wins. For
    Cache|Posix the reason has the settings of its copies. Raises `ConfigError` where that pipeline
    is chosen and ``cache_use_host_buffer`` is false.
    """
    if config.store_pipeline is not None:
        pipeline = config.store_pipeline
        reason = f"store_pipeline is set to {pipeline}"
    elif is_mla:
        pipeline = CACHE_POSIX
        reason = (
            "store_pipeline is not set, and the model is MLA: all ranks of a host need the same "
            "bytes, which are read once, into a buffer before the files"
        )
    else:
        pipeline = "Posix"
        reason = (
            "store_pipeline is not set, and the model is not MLA: every tensor-parallel rank owns "
            "its bytes and moves them between host pages and files"
        )
    if pipeline != CACHE_POSIX:
        return pipeline, reason + "."
    if not config.cache_use_host_buffer:
        raise ConfigError(
            "cache_use_host_buffer",
            False,
            f"true with store_pipeline {CACHE_POSIX}, since no device path is built",
            hint=f"{reason}; leave the key out, or set store_pipeline to Posix",
        )
    return pipeline, f"{reason}; {_copy_settings(config)}."


# What the Cache tier's copies go by, in the order of the log line.
_COPY_SETTINGS = (
    "cache_use_host_buffer",
    "cache_h2h_worker_number",
    "cache_h2h_queue_depth",
    "cache_h2h_cpu_affinity",
    "cache_io_aggregation",
    "cache_sdma_direct",
    "use_gdr",
)


def _copy_settings(config: Config) -> str:
    return ", ".join(f"{key} {_yaml_scalar(getattr(config, key))}" for key in _COPY_SETTINGS)


def check_geometry(
    config: Config, tensor_size_list: Sequence[int], shard_size: int, block_size: int
) -> None:
    """Refuse (`ConfigError`) a user's page geometry that isn't the host pool's.

    ``tensor_size_list``, ``shard_size``, ``block_size``: the host pool's, in bytes. Settings the
    user left out agree with everything.
    """
    actual = {
        "tensor_size_list": tuple(tensor_size_list),
        "shard_size": shard_size,
        "block_size": block_size,
    }
    for key, value in actual.items():
        given = getattr(config, key)
        if given is not None and given != value:
            shown = list(cast(tuple, value)) if isinstance(value, tuple) else value
            raise ConfigError(
                key,
                list(given) if isinstance(given, tuple) else given,
                f"{shown}, the host pool's own, in bytes",
                hint="leave the key out to have it filled in",
            )


def reference_yaml() -> str:
    """The text of ``configs/cachestore.yaml``: every setting, documented, at its default.

    After a change of the table, write it anew:
    ``python -m cachestore_connector.config > configs/cachestore.yaml``.
    """
    head = (
        "CacheStore settings, each at its default. Give this file to SGLang with "
        "--hicache-storage-backend-extra-config @cachestore.yaml, or name it in the environment "
        f"variable {CONFIG_VARIABLE}; the first wins where both give a key. A key that is left "
        "out, or null, takes its default."
    )
    blocks = [_comment(head)]
    for row in SETTINGS.values():
        kind, unit = row.metadata["kind"], row.metadata["unit"]
        default = None if row.metadata["from_environ"] else row.default
        shown = row.metadata["default_text"] or _yaml_scalar(default)
        if unit and default is not None:
            shown += f" {unit}"
        lines = [
            _comment(row.metadata["doc"]),
            _comment(f"Default: {shown}."),
            _comment(f"Allowed: {kind.allowed(unit)}."),
            _comment(f"Change: {row.metadata['when']}"),
            f"{row.name}: {_yaml_scalar(default)}\n",
        ]
        blocks.append("".join(lines))
    return "\n".join(blocks)


def _comment(text: str) -> str:
    return (
        textwrap.fill(
            text, 98, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )
        + "\n"
    )


def _yaml_scalar(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(reference_yaml(), end="")
