"""The table of settings: `Config`'s fields.

Name, type, default, unit, allowed values and documentation of a setting stand in its one field;
parsing, error messages and the shipped ``configs/cachestore.yaml`` are derived from them in
`cachestore_connector.config`. A new setting is a new field.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ._setting_types import (
    Absent,
    Bool,
    BoolOr,
    Choice,
    CpuList,
    Directories,
    Directory,
    Int,
    IntList,
    Number,
    Numbers,
    SettingType,
    Text,
    default_directories,
)
from .errors import ConfigError

_NO_DEVICE_PATH = (
    "it is a device path, none of which is built: pages go by a host buffer "
    "(cache_use_host_buffer); leave it out"
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

    Made by `cachestore_connector.config.load`, or directly with values already in their final form
    (a tuple of absolute, normalised paths for ``storage_backends``); either way a value that isn't
    allowed raises `ConfigError`.
    """

    store_pipeline: str | None = _setting(
        Choice("Posix", "Cache|Posix", nullable=True),
        None,
        "The tiers of the store; left out, the model type decides: Cache|Posix for MLA models, "
        "Posix for all others.",
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
    posix_capacity_gb: float | tuple[float, ...] | None = _setting(
        Numbers(2**30, each="storage_backends", nullable=True),
        None,
        "How much block files may take, those of all models in a directory together: in all, an "
        "equal part for each directory, or for each directory. Above it, the blocks used longest "
        "ago are evicted. Left out, nothing is evicted, but for posix_free_space_reserve_gb.",
        "Set it in production, to the same on every host that shares a directory.",
        unit="GiB, of 2**30 bytes",
    )
    posix_free_space_reserve_gb: float | None = _setting(
        Number(2**30, zero=True, nullable=True),
        None,
        "How much space is kept free on the file system of each directory, whatever takes it: "
        "below it, blocks are evicted and none are stored.",
        "Set it where others need room on the same disk, and on copy-on-write file systems.",
        unit="GiB, of 2**30 bytes",
    )
    posix_high_watermark_percent: int = _setting(
        Int(1, 100),
        97,
        "How full, of its capacity, a directory is when eviction begins.",
        "Lower it if dumps find no room before eviction has made it.",
        unit="percent",
    )
    posix_low_watermark_percent: int = _setting(
        Int(1, 100, why="at most posix_high_watermark_percent"),
        95,
        "How full, of its capacity, a directory is when eviction ends.",
        "Lower it for fewer and longer evictions.",
        unit="percent",
    )
    verify: Literal["always", "sample", "never"] = _setting(
        Choice("always", "sample", "never"),
        "always",
        "Whether the bytes of a block are compared with their checksums when it is loaded: of "
        "each, of one in sixteen, of none. Its record is always checked, and so are the bytes of "
        "what this host hasn't written since it was started.",
        "Leave it: a damaged page is a wrong answer, and checking takes a tenth of a load at most.",
    )
    io_direct: bool | Literal["required"] = _setting(
        BoolOr("required"),
        False,
        "Reads and writes block files with O_DIRECT, past the page cache. Where the file system "
        "refuses that, true goes through the page cache, with a warning, and required is an error.",
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
    cache_use_host_buffer: bool = _setting(
        Bool(),
        True,
        "Cache|Posix: pages are copied between host memory and a host buffer.",
        "Leave it true: false is refused with Cache|Posix, since no device path is built.",
    )
    share_buffer_enable: bool = _setting(
        Bool(),
        True,
        "Cache|Posix: one buffer for all processes of this user, host and identity, in shared "
        "memory.",
        "False gives each process a buffer of its own, which needs no shared memory, and has each "
        "rank read each page itself.",
    )
    cache_buffer_directory: str = _setting(
        Directory(),
        "/dev/shm",
        "Cache|Posix: a tmpfs, where the shared buffer is.",
        "Set it where another tmpfs has the room.",
    )
    cache_buffer_capacity_gb: float | None = _setting(
        Number(2**20, nullable=True),
        None,
        "Cache|Posix: size of the buffer, all of it reserved at attach; who joins a shared one "
        "takes the size that is there. Left out, it is half of the shared memory that is free; "
        "where that has no room for 128 pages, the buffer is private, with a warning. A private "
        "one takes a sixteenth of the memory that is free.",
        "Set it in production, to what the host has to spare; a size that doesn't fit is refused.",
        unit="GiB, of 2**30 bytes",
    )
    cache_dirty_percent: int = _setting(
        Int(1, 87, why="loads keep an eighth of the buffer"),
        50,
        "Cache|Posix: how much of the buffer may hold pages that are not yet stored; dumps beyond "
        "that go to the storage at once.",
        "Lower it if bursts of dumps push out pages that are loaded often.",
        unit="percent",
    )
    cache_h2h_worker_number: int = _setting(
        Int(1, 64),
        4,
        "Cache|Posix: threads that copy out of the buffer, and as many again that copy into it.",
        "Raise it where copies, not the storage, are the limit; lower it where cores are scarce.",
        unit="threads per direction",
    )
    cache_h2h_queue_depth: int = _setting(
        Int(128, 1048576, why="SGLang sends 128 pages in one call"),
        1024,
        "Cache|Posix: pages queued and being copied at once, counted for loads and for dumps; a "
        "request that finds no room for all its pages is refused.",
        "Raise it if refused requests are counted.",
        unit="pages per direction",
    )
    cache_h2h_cpu_affinity: str = _setting(
        CpuList(),
        "auto",
        "Cache|Posix: CPUs of the copying threads; auto takes those of the buffer's NUMA node "
        "where there are several nodes, none leaves it to the system.",
        "Set CPUs to keep the threads away from those that serve.",
    )
    cache_peer_timeout_ms: int = _setting(
        Int(10, 3600000),
        5000,
        "Cache|Posix: how long a page that another process is loading is waited for, before it is "
        "read from the storage after all.",
        "Raise it where the storage is slow; lower it if stopped processes hold others up.",
        unit="ms",
    )
    cache_io_aggregation: bool = _setting(
        Bool(refused_true=_NO_DEVICE_PATH),
        False,
        "A device path, which is not built.",
        "Leave it out.",
    )
    cache_sdma_direct: bool = _setting(
        Bool(refused_true=_NO_DEVICE_PATH),
        False,
        "A device path, which is not built.",
        "Leave it out.",
    )
    use_gdr: bool = _setting(
        Bool(refused_true=_NO_DEVICE_PATH),
        False,
        "A device path, which is not built.",
        "Leave it out.",
    )
    gpu_kv_buffer_addrs: None = _setting(
        Absent(_NO_DEVICE_PATH),
        None,
        "Addresses for a device path, which is not built.",
        "Leave it out.",
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
    namespace: str | None = _setting(
        Text(nullable=True),
        None,
        "Separates what would be shared otherwise: pages of one namespace are found in no other.",
        "Set it to a name for each tenant, or each experiment, that is to share with nobody else.",
    )
    model_identity: str | None = _setting(
        Text(nullable=True),
        None,
        "Names the weights with their configuration, in place of model path, revision and served "
        "model name.",
        "Set the same name wherever the same weights are served from different paths, and a new "
        "one when the weights under a path change.",
    )

    def __post_init__(self) -> None:
        for row in dataclasses.fields(self):
            row.metadata["kind"].check(row.name, getattr(self, row.name), row.metadata["unit"])
        capacities, directories = self.posix_capacity_gb, len(self.storage_backends)
        if isinstance(capacities, tuple) and len(capacities) != directories:
            raise ConfigError(
                "posix_capacity_gb",
                list(capacities),
                f"a list of {directories}, one for each of storage_backends, or a number for all",
                hint=f"the list has {len(capacities)}",
            )
        low, high = self.posix_low_watermark_percent, self.posix_high_watermark_percent
        if low > high:
            raise ConfigError(
                "posix_low_watermark_percent",
                low,
                f"at most posix_high_watermark_percent, which is {high}",
            )


SETTINGS: dict[str, dataclasses.Field[Any]] = {row.name: row for row in dataclasses.fields(Config)}
