"""Settings: YAML or JSON -> one frozen, validated `Config`, and the choice of the pipeline.

`Config`'s fields are the table of settings: name, type, default, unit, allowed values and
documentation of a setting stand in its one field, and parsing, error messages and the shipped
``configs/cachestore.yaml`` (`reference_yaml`) are derived from them. A new setting is a new field.

`load` reads each setting from the first source that gives it: SGLang's
``--hicache-storage-backend-extra-config``, then the YAML or JSON file that the environment
variable ``CACHESTORE_CONFIG`` names, then the default. ``null`` is as good as leaving a key out.

Everything here is pure but for reading that file and the user database (for ``~``), and may be
called from any thread.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from ._config_file import read_config_file
from ._setting_types import (
    Bool,
    Choice,
    Directories,
    Int,
    IntList,
    SettingType,
    Text,
    default_directories,
)
from .errors import ConfigError

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

# Settings of a tier that is not there yet: known, so that the refusal can say why.
CACHE_TIER_KEYS = (
    "cache_use_host_buffer",
    "cache_h2h_worker_number",
    "cache_h2h_queue_depth",
    "cache_io_aggregation",
    "cache_sdma_direct",
    "use_gdr",
    "gpu_kv_buffer_addrs",
)


def _setting(
    kind: SettingType,
    default: Any,
    doc: str,
    when: str,
    *,
    unit: str = "",
    from_environ: Callable[[Mapping[str, str]], Any] | None = None,
    default_text: str = "",
) -> Any:
    """One row of the table.

    ``doc``: what the setting does, in one sentence. ``when``: when to change it. ``unit``: of an
    integer. A default that depends on the environment has ``from_environ``, which computes it,
    and ``default_text``, which describes it.
    """
    metadata = {
        "kind": kind,
        "doc": doc,
        "when": when,
        "unit": unit,
        "from_environ": from_environ,
        "default_text": default_text,
    }
    if from_environ is None:
        return dataclasses.field(default=default, metadata=metadata)
    return dataclasses.field(default_factory=lambda: from_environ(os.environ), metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, checked. Immutable; safe to share between threads.

    Made by `load`, or directly with values already in their final form (a tuple of absolute,
    normalised paths for ``storage_backends``); either way a value that isn't allowed raises
    `ConfigError`.
    """

    store_pipeline: str | None = _setting(
        Choice(
            "Posix",
            nullable=True,
            refused={"Cache|Posix": "Cache|Posix is not built yet: use Posix or leave the key out"},
        ),
        None,
        "The tiers of the store; left out, the model type decides.",
        "Leave it out, unless one pipeline must be forced for every model.",
    )
    storage_backends: tuple[str, ...] = _setting(
        Directories(),
        None,
        "Directories that hold the blocks; blocks are spread over all of them.",
        "Set it to local NVMe directories, or to a shared file system that several hosts mount.",
        from_environ=default_directories,
        default_text="[$XDG_CACHE_HOME/cachestore], or [~/.cache/cachestore] where that is not set",
    )
    io_direct: bool = _setting(
        Bool(),
        False,
        "Reads and writes block files with O_DIRECT, past the page cache.",
        "True for NVMe where the blocks far outgrow the memory; false where files are read again.",
    )
    posix_zero_copy: Literal["auto", "always", "never"] = _setting(
        Choice("auto", "always", "never"),
        "auto",
        "Whether file I/O goes straight into and out of host pages; auto does so only on local "
        "file systems, whose I/O is sure to end.",
        "Never, if a local-looking file system can hang; always, only if a network one cannot.",
    )
    posix_load_worker_number: int = _setting(
        Int(1, 256),
        8,
        "Threads that read block files.",
        "Raise it for storage that needs many requests in flight: network, striped NVMe.",
        unit="threads",
    )
    posix_dump_worker_number: int = _setting(
        Int(1, 256),
        8,
        "Threads that write block files.",
        "Raise it if backups fall behind; lower it if they slow down loads.",
        unit="threads",
    )
    posix_queue_depth: int = _setting(
        Int(128, 1048576, why="SGLang sends 128 pages in one call"),
        1024,
        "Pages queued and running at once, counted for loads and for dumps; a request that finds "
        "no room for all its pages is refused.",
        "Raise it if refused requests are counted while the storage keeps up.",
        unit="pages per direction",
    )
    timeout_ms: int = _setting(
        Int(100, 3600000),
        30000,
        "Time after which a request ends, whatever the storage does; its pages are then misses.",
        "Lower it if recomputing a prefix is faster than waiting for a slow mount.",
        unit="ms",
    )
    tensor_size_list: tuple[int, ...] | None = _setting(
        IntList(nullable=True),
        None,
        "Sizes of the tensors of one page, in order; filled in from the host pool.",
        "Leave it out; set, it is compared with the host pool's and a difference is refused.",
        unit="bytes",
    )
    shard_size: int | None = _setting(
        Int(1, 2**63 - 1, nullable=True),
        None,
        "Size of one shard (one page, with padding); filled in from the host pool.",
        "Leave it out; set, it is compared with the host pool's and a difference is refused.",
        unit="bytes",
    )
    block_size: int | None = _setting(
        Int(1, 2**63 - 1, nullable=True),
        None,
        "Size of one block (of one shard); filled in from the host pool.",
        "Leave it out; set, it is compared with the host pool's and a difference is refused.",
        unit="bytes",
    )
    model_identity: str | None = _setting(
        Text(nullable=True),
        None,
        "Names the weights, in place of model path, revision and served model name.",
        "Set the same name wherever the same weights are served from different paths, and a new "
        "one when the weights under a path change.",
    )

    def __post_init__(self) -> None:
        for row in dataclasses.fields(self):
            row.metadata["kind"].check(row.name, getattr(self, row.name), row.metadata["unit"])


SETTINGS: dict[str, dataclasses.Field[Any]] = {row.name: row for row in dataclasses.fields(Config)}


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
    if key in CACHE_TIER_KEYS:
        hint = f"{key} belongs to the Cache tier, which is not built yet: leave it out"
        return ConfigError(key, value, allowed, source=source, hint=hint)
    near = difflib.get_close_matches(
        key.lower().replace("-", "_"), [*SETTINGS, *SGLANG_KEYS], n=1, cutoff=0.6
    )
    hint = "no such setting" + (f", did you mean {near[0]}?" if near else "")
    return ConfigError(key, value, allowed, source=source, hint=hint)


def choose_pipeline(config: Config, is_mla: bool) -> tuple[str, str]:
    """(pipeline, reason), the reason being one sentence to log once.

    ``is_mla``: whether every tensor-parallel rank holds the same KV. A user's value wins.
    """
    if config.store_pipeline is not None:
        return config.store_pipeline, f"store_pipeline is set to {config.store_pipeline}."
    if is_mla:
        return "Posix", (
            "store_pipeline is not set, and the pipeline for MLA models, Cache|Posix, is not "
            "built yet: every rank loads its pages from the files itself."
        )
    return "Posix", (
        "store_pipeline is not set, and the model is not MLA: every tensor-parallel rank owns "
        "its bytes and moves them between host pages and files."
    )


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
