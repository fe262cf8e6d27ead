"""What the log says of an attach, in one record: pipeline and why, pools, memory, directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .config import Config
from .opening import shard_size, space
from .pools import Pool
from .store import Event

PREFIX = "CacheStore: "  # of every line, so that a search finds them all

_BUFFER = "cache buffer: "  # how the store begins to tell of it


def of_pool(pool: Pool) -> str:
    """What is stored of a host pool, as what, and by whom."""
    layout = pool.layout
    slots = f"{layout.page_size} tokens" if layout.page_size > 1 else "1 slot"
    names = " and ".join(part.identity.directory_name for part in pool.parts)
    return (
        f"pool {pool.name} ({type(pool.host_pool).__name__}): pages of {slots}, "
        f"{layout.page_bytes} bytes in {len(layout.tensor_sizes)} tensors, "
        f"layout {pool.host_pool.layout}, as {names}; "
        f"stored by {'every rank' if pool.every_rank_stores else 'rank 0'}"
    )


def of_attach(
    pipeline: str,
    reason: str,
    pools: Sequence[Pool],
    config: Config,
    stats: Mapping[str, int],
    events: Sequence[Event],
) -> str:
    """One line each. ``pools``: all, the store's first one first. ``stats``, ``events``: of it."""
    lines = [
        f"pipeline {pipeline} ({reason})",
        *map(of_pool, pools),
        f"memory: {_memory(pipeline, pools[0], config, stats, events)}",
        f"directories: {_directories(config, stats)}; {space(config)}",
    ]
    return f"\n{PREFIX}  ".join(lines)


def has(event: Event) -> bool:
    """Whether the summary has it already."""
    return event.text.startswith(_BUFFER)


def _memory(
    pipeline: str, pool: Pool, config: Config, stats: Mapping[str, int], events: Sequence[Event]
) -> str:
    slots = stats["cache_slots"]
    if slots == 0:
        return "no cache buffer: pages go from host memory to files"
    told = next((event.text for event in events if has(event)), f"{_BUFFER}{slots} slots")
    each = shard_size(config, pipeline, sum(pool.parts[0].tensor_sizes))
    where = f"in {config.cache_buffer_directory}, " if "shared" in told else ""
    return (
        f"{told}; {where}{each} bytes a slot, {config.cache_dirty_percent} % of them at most with "
        "what isn't in files yet"
    )


def _directories(config: Config, stats: Mapping[str, int]) -> str:
    listed = ", ".join(config.storage_backends)
    bad = {
        "out of use": stats["posix_directories_out"],
        "read-only": stats["posix_directories_read_only"],
    }
    said = ", ".join(f"{count} {what}" for what, count in bad.items() if count)
    return f"{listed} ({said})" if said else listed
