"""`cachestore doctor`: shared memory, limits of the process, NUMA and huge pages."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

from .. import config as settings
from ..host_memory import available_memory
from ..mounts import Mount, mount_of
from . import output
from .doctor_config import uses_cache
from .doctor_finding import Finding, fail, ok, warn

_GIB = 1 << 30
_DOCKER = "in docker: --shm-size=200g, or --ipc=host; in Kubernetes an emptyDir of medium Memory"
# 128 pages of a large model; below that an automatic size gives up sharing.
_SMALL = 1 << 30
# What SGLang raises its limit to.
_SGLANG_FILES = 65535


def buffer(config: settings.Config) -> list[Finding]:
    """Whether the cache buffer of MLA models finds its room."""
    check = "shared memory"
    if not uses_cache(config):
        return [ok(check, f"not needed: store_pipeline is {config.store_pipeline}")]
    if not config.share_buffer_enable:
        return [private_buffer(config.cache_buffer_capacity_gb, available_memory())]
    path = config.cache_buffer_directory
    try:
        system = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        what = f"{path}: {error.strerror}; the buffer of MLA models is made there"
        return [fail(check, what, "give cache_buffer_directory a tmpfs that can be written")]
    mount = mount_of(path)
    if mount is not None and mount.kind not in ("tmpfs", "ramfs"):
        what = f"{path} is on {mount.kind}, a disk: the buffer would be written to it all the time"
        return [fail(check, what, "set cache_buffer_directory to a tmpfs, such as /dev/shm")]
    return [
        shared_buffer(
            path,
            config.cache_buffer_capacity_gb,
            total=system.f_blocks * system.f_frsize,
            free=system.f_bavail * system.f_frsize,
            available=available_memory(),
            certain=config.store_pipeline is not None,
        )
    ]


def shared_buffer(
    path: str,
    capacity_gb: float | None,
    *,
    total: int,
    free: int,
    available: int | None,
    certain: bool,
) -> Finding:
    """Whether a shared one fits.

    ``total``, ``free``: of the tmpfs, ``available``: memory, in bytes. ``certain``: it is used for
    every model, not only where that is MLA.
    """
    check = "shared memory"
    whose = "" if certain else " (only MLA models use it)"
    what = f"{path}: {output.amount(free)} of {output.amount(total)} free"
    docker = f"; {_DOCKER}" if total <= 2 * _GIB else ""
    if capacity_gb is None:
        if free // 2 < _SMALL:
            return warn(
                check,
                f"{what}, too little for a buffer to share: each rank gets a small one of its "
                f"own, and reads each page itself{whose}",
                f"make it larger{docker}; or set store_pipeline: Posix",
            )
        return warn(
            check,
            f"{what}; the buffer takes half of that, as cache_buffer_capacity_gb isn't set{whose}",
            "set cache_buffer_capacity_gb in production: what it takes is gone for all else",
        )
    wanted = int(capacity_gb * _GIB)
    if wanted > free:
        return fail(
            check,
            f"{what}, and cache_buffer_capacity_gb wants {output.amount(wanted)}: an MLA model's "
            "server doesn't start (unless a left-over buffer, below, makes room)",
            f"lower cache_buffer_capacity_gb, or make it larger{docker or '; ' + _DOCKER}",
        )
    if available is not None and wanted > available:
        return fail(
            check,
            f"{what}, but only {output.amount(available)} of memory are to be had (the "
            f"container's limit counts), and the buffer wants {output.amount(wanted)}",
            "lower cache_buffer_capacity_gb, or raise the container's memory limit",
        )
    return ok(check, f"{what}; the buffer takes {output.amount(wanted)}{whose}")


def private_buffer(capacity_gb: float | None, available: int | None) -> Finding:
    """A buffer for each process: its size counts once a rank."""
    check = "memory"
    if available is None:
        return ok(check, "a buffer for each process; how much memory is free isn't known")
    wanted = int(capacity_gb * _GIB) if capacity_gb else available // 16
    what = (
        f"{output.amount(available)} to be had, and each process of an MLA model takes "
        f"{output.amount(wanted)} (share_buffer_enable is false)"
    )
    if wanted > available:
        return fail(check, what, "lower cache_buffer_capacity_gb")
    return ok(
        check,
        f"{what}: room for {output.count(available // max(1, wanted), 'process', 'processes')}",
    )


def locked_memory(limit: int | None = None, devices: str = "/sys/class/infiniband") -> Finding:
    """The limit of memory that may be locked; bytes, -1 without one."""
    check = "memlock"
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return ok(check, "no limit")
    what = f"limit {output.amount(limit)}; nothing of CacheStore locks memory"
    try:
        has_rdma = bool(os.listdir(devices))
    except OSError:
        has_rdma = False
    if has_rdma:
        return warn(
            check,
            f"{what}, but RDMA does (PD disaggregation, storage over RDMA), and there are devices",
            "ulimit -l unlimited; in docker: --ulimit memlock=-1",
        )
    return ok(check, what)


def open_files(config: settings.Config, limits: tuple[int, int] | None = None) -> Finding:
    """The limit of open files. ``limits``: (soft, hard)."""
    check = "open files"
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    # A file for each worker, and for each that is stuck in a mount (four times their number).
    workers = config.posix_load_worker_number + config.posix_dump_worker_number
    wanted = workers * 5 + 16 * len(config.storage_backends) + 64
    raise_it = "ulimit -n 65535; in docker: --ulimit nofile=65535:65535"
    if hard == unlimited or hard >= _SGLANG_FILES:
        return ok(check, f"SGLang takes {_SGLANG_FILES:,}, CacheStore {wanted} of them at most")
    what = f"limit {soft:,}, which SGLang would raise to {_SGLANG_FILES:,} and can't"
    if soft < wanted + 256:
        return fail(
            check,
            f"{what}: too few for {workers} threads that read and write files, beside SGLang's "
            "sockets",
            raise_it,
        )
    return warn(check, f"{what}: enough for CacheStore ({wanted} at most)", raise_it)


def file_size(limit: int | None = None) -> Finding:
    """The limit of a file's size; bytes, -1 without one."""
    check = "file size"
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return ok(check, "no limit")
    return warn(
        check,
        f"limit {output.amount(limit)}: pages larger than that aren't stored (NO_SPACE), and a "
        "larger buffer can't be made",
        "ulimit -f unlimited",
    )


def numa(
    config: settings.Config, allowed: set[int] | None = None, system: str = "/sys/devices/system"
) -> list[Finding]:
    """Nodes, and the CPUs of the copying threads."""
    check = "NUMA"
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    nodes = sorted(path.name for path in Path(system, "node").glob("node[0-9]*"))
    found = []
    given = config.cache_h2h_cpu_affinity
    if uses_cache(config) and given not in ("auto", "none"):
        outside = cpus(given) - allowed
        if outside:
            found.append(
                fail(
                    check,
                    f"cache_h2h_cpu_affinity names CPUs {_ranges(outside)}, which this process "
                    f"may not use (it may: {_ranges(allowed)})",
                    "name CPUs of these, or auto; see taskset, and docker's --cpuset-cpus",
                )
            )
    if len(nodes) < 2:
        return found or [ok(check, "one node: nothing to place")]
    balancing = Path(system).parents[2] / "proc/sys/kernel/numa_balancing"
    try:
        is_balancing = balancing.read_text().strip() not in ("0", "")
    except OSError:
        is_balancing = False
    what = f"{len(nodes)} nodes"
    if is_balancing:
        found.append(
            warn(
                check,
                f"{what}, and the kernel moves pages between them: stalls while KV is copied",
                "echo 0 > /proc/sys/kernel/numa_balancing",
            )
        )
    elif uses_cache(config) and given == "none":
        found.append(
            warn(
                check,
                f"{what}, and cache_h2h_cpu_affinity is none: copies may cross between them",
                "leave cache_h2h_cpu_affinity at auto",
            )
        )
    else:
        found.append(ok(check, f"{what}; copying threads run where the buffer is, by auto"))
    return found


def cpus(text: str) -> set[int]:
    """The CPUs of a list such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _ranges(numbers: set[int]) -> str:
    shown: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if start is None:
            start = number
        elif number is None or number != previous + 1:
            shown.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        previous = number
    return ",".join(shown)


def huge_pages(config: settings.Config, mount: Mount | None = None) -> Finding:
    """Whether the shared buffer gets huge pages."""
    check = "huge pages"
    if not uses_cache(config):
        return ok(check, "not needed without a buffer")
    if not config.share_buffer_enable:
        try:
            text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        except OSError:
            return ok(check, "the kernel has none")
        if "[never]" in text:
            return warn(
                check,
                "switched off in the kernel: copies into and out of the buffer are slower",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        return ok(check, "asked for, for each private buffer")
    mount = mount or mount_of(config.cache_buffer_directory)
    if mount is None or mount.kind != "tmpfs":
        return ok(check, "not known for this file system")
    huge = mount.option("huge") or "never"
    if huge == "never":
        return warn(
            check,
            f"{mount.point} is mounted without them: copies into and out of the buffer are "
            "somewhat slower",
            f"mount -o remount,huge=advise {mount.point}",
        )
    return ok(check, f"{mount.point} is mounted with huge={huge}")
