"""From settings, identity and page layout to the native store."""

from __future__ import annotations

import json
from typing import Any

from . import config as settings
from .errors import ConfigError, StoreNoMemory
from .identity import Identity
from .store import Store, StoreOptions

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


def open_store(
    config: settings.Config, pipeline: str, identity: Identity, tensor_sizes: tuple[int, ...]
) -> Store:
    """Open the store for pages of these tensors, one shard a block.

    Raises `ConfigError` for a user's geometry that isn't the pool's, or a buffer that doesn't fit;
    `StoreError` for what else the native side can't do.
    """
    size = shard_size(config, pipeline, sum(tensor_sizes))
    settings.check_geometry(config, tensor_sizes, size, size)
    fields: dict[str, Any] = {name: getattr(config, name) for name in _PASSED_ON}
    capacity = config.cache_buffer_capacity_gb
    options = StoreOptions(
        pipeline=pipeline,
        identity_name=identity.directory_name,
        identity_manifest=json.dumps(identity.manifest(), indent=2, sort_keys=True) + "\n",
        identity_fingerprint=identity.fingerprint,
        tensor_sizes=tensor_sizes,
        shard_size=size,
        block_size=size,
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


# Settings that the native store has under the same name.
_PASSED_ON = (
    "storage_backends",
    "posix_load_worker_number",
    "posix_dump_worker_number",
    "posix_queue_depth",
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
