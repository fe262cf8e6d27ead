"""From settings, identity and page layout to the native store."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from . import config as settings
from . import manifest
from .errors import ConfigError, StoreError, StoreInvalidArgument, StoreNoMemory
from .identity import Identity
from .store import PoolOptions, Store, StoreOptions

_ALIGNMENT = 4096
_GIB = 1 << 30


def shard_size(config: settings.Config, pipeline: str, payload: int) -> int:
    """Bytes of one shard: a page's tensors, and the zeroes after them.

    Aligned where I/O or slots are (contract, A: ``io_direct``, and a slot is K, V, zero padding).
    The files are the same either way: docs/format.md pads every one of them.
    """
    if config.io_direct or pipeline == settings.CACHE_POSIX:
        return -(-payload // _ALIGNMENT) * _ALIGNMENT
    return payload


def capacities(config: settings.Config) -> tuple[int, ...] | None:
    """Bytes that each of ``storage_backends`` may hold; None without a limit."""
    given, count = config.posix_capacity_gb, len(config.storage_backends)
    if given is None:
        return None
    each = given if isinstance(given, tuple) else (given / count,) * count
    return tuple(max(1, int(gib * _GIB)) for gib in each)


def space(config: settings.Config) -> str:
    """What the log says of space: one clause."""
    limits = []
    if config.posix_capacity_gb is not None:
        given = config.posix_capacity_gb
        each = given if isinstance(given, tuple) else (given,)
        limits.append(
            f"{', '.join(f'{gib:g}' for gib in each)} GiB of blocks "
            f"({'each' if isinstance(given, tuple) else 'in all'}; eviction from "
            f"{config.posix_high_watermark_percent} % down to "
            f"{config.posix_low_watermark_percent} %)"
        )
    if config.posix_free_space_reserve_gb:
        limits.append(f"{config.posix_free_space_reserve_gb:g} GiB kept free")
    if limits:
        return "room for " + ", ".join(limits)
    return "nothing is evicted: neither posix_capacity_gb nor posix_free_space_reserve_gb is set"


def open_store(
    config: settings.Config, pipeline: str, identity: Identity, tensor_sizes: tuple[int, ...]
) -> Store:
    """Open the store for pages of these tensors, one shard a block.

    Raises `ConfigError` for a user's geometry that isn't the pool's, a buffer that doesn't fit, or
    a value that the native side refuses; `StoreError` for what else it can't do.
    """
    pool = _pool(config, pipeline, identity, tensor_sizes)
    settings.check_geometry(config, tensor_sizes, pool.shard_size, pool.block_size)
    fields: dict[str, Any] = {name: getattr(config, name) for name in _PASSED_ON}
    capacity = config.cache_buffer_capacity_gb
    options = StoreOptions(
        **vars(pool),
        pipeline=pipeline,
        posix_capacities=capacities(config),
        posix_free_space_reserve=int((config.posix_free_space_reserve_gb or 0) * _GIB),
        # 0 means that the native side chooses.
        cache_buffer_capacity=0 if capacity is None else max(1, round(capacity * _GIB)),
        **fields,
    )
    try:
        return Store(options)
    except StoreNoMemory as error:
        if capacity is None:
            raise
        raise ConfigError(
            "cache_buffer_capacity_gb",
            capacity,
            "a size that holds a page and can be reserved",
            hint=str(error),
        ) from error
    except StoreInvalidArgument as error:
        for field, key in _KEYS.items():
            if field in str(error):
                value = getattr(config, key)
                shown = list(value) if isinstance(value, tuple) else value
                raise ConfigError(key, shown, _ALLOWED[key], hint=str(error)) from error
        raise
    except StoreError as error:
        if not _is_about_storage(str(error), config):
            raise
        hint = f"{error}; `cachestore doctor`, as this user, looks at each"
        allowed = "directories that this user can make, or write in"
        shown = list(config.storage_backends)
        raise ConfigError("storage_backends", shown, allowed, hint=hint) from error


def _is_about_storage(text: str, config: settings.Config) -> bool:
    paths = [PurePath(path) for path in config.storage_backends]
    if any(str(path) in text for path in paths):
        return True
    above = {str(parent) for path in paths for parent in path.parents} - {"/"}
    return config.cache_buffer_directory not in text and any(path in text for path in above)


def open_pool(
    store: Store,
    config: settings.Config,
    pipeline: str,
    identity: Identity,
    tensor_sizes: tuple[int, ...],
) -> int:
    """Open a further pool of the store, for pages of these tensors; its number.

    Raises `StoreError`.
    """
    return store.open_pool(_pool(config, pipeline, identity, tensor_sizes))


def _pool(
    config: settings.Config, pipeline: str, identity: Identity, tensor_sizes: tuple[int, ...]
) -> PoolOptions:
    size = shard_size(config, pipeline, sum(tensor_sizes))
    return PoolOptions(
        identity_name=identity.directory_name,
        identity_manifest=manifest.describe(identity).text(),
        identity_fingerprint=identity.fingerprint,
        tensor_sizes=tensor_sizes,
        shard_size=size,
        block_size=size,
    )


# What the native store refuses only when it opens, by the field that its message begins with.
_KEYS = {"posix_capacit": "posix_capacity_gb", "io_direct": "io_direct"}
_ALLOWED = {
    "posix_capacity_gb": "room for a block in each of storage_backends at least",
    "io_direct": "true or false on this file system",
}

# Settings that the native store has under the same name.
_PASSED_ON = (
    "storage_backends",
    "posix_load_worker_number",
    "posix_dump_worker_number",
    "posix_queue_depth",
    "posix_high_watermark_percent",
    "posix_low_watermark_percent",
    "verify",
    "io_direct",
    "posix_zero_copy",
    "timeout_ms",
    "share_buffer_enable",
    "cache_buffer_directory",
    "cache_dirty_percent",
    "cache_h2h_worker_number",
    "cache_h2h_queue_depth",
    "cache_h2h_cpu_affinity",
    "cache_peer_timeout_ms",
)
