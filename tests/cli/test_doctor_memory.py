"""`cachestore doctor`: shared memory, limits, NUMA, huge pages."""

import resource

import pytest

from cachestore_connector import host_memory
from cachestore_connector.cli import doctor_memory
from cachestore_connector.config import load
from cachestore_connector.mounts import Mount
from disks import small_disk

GIB = 1 << 30


def config(**given):
    return load({"storage_backends": ["/nowhere"], **given}, {})


def shared(capacity_gb=None, **changed):
    given = {"total": 200 * GIB, "free": 190 * GIB, "available": 150 * GIB, "certain": True}
    return doctor_memory.shared_buffer("/dev/shm", capacity_gb, **given | changed)


def test_shared_memory_too_small(tmp_path):
    """Pinned: docker's 64 MB: a failure if a size is set, else a warning; both name --shm-size."""
    with small_disk(tmp_path / "shm", "size=64m") as shm:
        place = {"cache_buffer_directory": str(shm)}
        (found,) = doctor_memory.buffer(config(**place, cache_buffer_capacity_gb=1))
        assert found.level == "FAIL" and "--shm-size" in found.do
        (found,) = doctor_memory.buffer(config(**place))
        assert found.level == "WARN" and "--shm-size" in found.do
        (found,) = doctor_memory.buffer(config(**place, cache_buffer_capacity_gb=0.05))
        assert found.level == "OK"
        (found,) = doctor_memory.buffer(config(**place, store_pipeline="Posix"))
        assert found.level == "OK" and "not needed" in found.what


def test_shared_memory_that_is_none(tmp_path):
    """Pinned: a directory that isn't there, and one on a disk."""
    (found,) = doctor_memory.buffer(config(cache_buffer_directory=str(tmp_path / "none")))
    assert found.level == "FAIL"
    if doctor_memory.mount_of(str(tmp_path)).kind in ("tmpfs", "ramfs"):
        pytest.skip("the test's directory is on a tmpfs: there is no disk to name")
    (found,) = doctor_memory.buffer(config(cache_buffer_directory=str(tmp_path)))
    assert found.level == "FAIL" and "a disk" in found.what


def test_shared_buffer():
    """Pinned: the size beside the tmpfs's room, and beside what memory the container has."""
    assert shared(100).level == "OK"
    assert shared(191, available=None).level == "FAIL"
    assert shared(160).level == "FAIL"  # the memory limit
    assert shared(160, available=None).level == "OK"
    assert shared(None).level == "WARN"
    assert "only MLA models" in shared(100, certain=False).what


def test_private_buffer():
    """Pinned: share_buffer_enable: false takes the size once a process."""
    assert doctor_memory.private_buffer(10, 100 * GIB).level == "OK"
    assert "10 processes" in doctor_memory.private_buffer(10, 100 * GIB).what
    assert doctor_memory.private_buffer(101, 100 * GIB).level == "FAIL"
    assert doctor_memory.private_buffer(None, None).level == "OK"


def test_available_memory(tmp_path):
    """Pinned: the least of the system's and of every cgroup above this process."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable: 1000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    assert host_memory.available_memory(str(tmp_path)) == 1000 * 1024
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "a/b").mkdir(parents=True)
    for path, limit, used in ((groups / "a/b", "max", "5"), (groups / "a", "9000", "1000")):
        (path / "memory.max").write_text(limit + "\n")
        (path / "memory.current").write_text(used + "\n")
    assert host_memory.available_memory(str(tmp_path)) == 8000
    assert host_memory.available_memory(str(tmp_path / "none")) is None


def test_locked_memory(tmp_path):
    """Pinned: a limit is warned of where there are RDMA devices."""
    none, some = tmp_path / "none", tmp_path / "some"
    (some / "mlx5_0").mkdir(parents=True)
    assert doctor_memory.locked_memory(resource.RLIM_INFINITY, str(some)).level == "OK"
    assert doctor_memory.locked_memory(8 << 20, str(some)).level == "WARN"
    assert doctor_memory.locked_memory(8 << 20, str(none)).level == "OK"
    assert doctor_memory.locked_memory().level in ("OK", "WARN")


def test_open_files():
    """Pinned: SGLang raises the soft limit if the hard one lets it; else the soft one counts."""
    wide = config(posix_load_worker_number=256, posix_dump_worker_number=256)
    assert doctor_memory.open_files(config(), (1024, 1 << 20)).level == "OK"
    assert doctor_memory.open_files(config(), (64, resource.RLIM_INFINITY)).level == "OK"
    assert doctor_memory.open_files(config(), (1024, 4096)).level == "WARN"
    assert doctor_memory.open_files(config(), (256, 4096)).level == "FAIL"
    assert doctor_memory.open_files(wide, (1024, 4096)).level == "FAIL"


def test_file_size():
    """Pinned: a limit of a file's size is one of what can be stored."""
    assert doctor_memory.file_size(resource.RLIM_INFINITY).level == "OK"
    assert doctor_memory.file_size(1 << 20).level == "WARN"


def nodes(tmp_path, count, balancing="0"):
    system = tmp_path / "sys" / "devices" / "system"
    for number in range(count):
        (system / "node" / f"node{number}").mkdir(parents=True, exist_ok=True)
    kernel = tmp_path / "proc/sys/kernel"
    kernel.mkdir(parents=True, exist_ok=True)
    (kernel / "numa_balancing").write_text(balancing + "\n")
    return str(system)


def numa(tmp_path, count=1, balancing="0", **given):
    system = nodes(tmp_path, count, balancing)
    found = doctor_memory.numa(config(**given), set(range(8)), system)
    return [each.level.value for each in found]


def test_numa(tmp_path):
    """Pinned: CPUs that this process may not use fail; balancing between nodes is warned of."""
    assert numa(tmp_path) == ["OK"]
    assert numa(tmp_path, cache_h2h_cpu_affinity="0-7") == ["OK"]
    assert numa(tmp_path, cache_h2h_cpu_affinity="6-9") == ["FAIL"]
    assert numa(tmp_path, cache_h2h_cpu_affinity="6-9", store_pipeline="Posix") == ["OK"]
    assert numa(tmp_path, 2) == ["OK"]
    assert numa(tmp_path, 2, cache_h2h_cpu_affinity="none") == ["WARN"]
    assert numa(tmp_path, 2, "1") == ["WARN"]


def test_ranges_of_cpus():
    """Pinned: there and back."""
    for text in ("0", "0-3", "0-3,8", "1,3,5-6"):
        assert doctor_memory._ranges(doctor_memory.cpus(text)) == text


def test_huge_pages():
    """Pinned: a tmpfs that is mounted without them is warned of."""

    def said(*options, **given):
        mount = Mount("/dev/shm", "tmpfs", "tmpfs", frozenset(options))
        return doctor_memory.huge_pages(config(**given), mount).level

    assert said("rw") == "WARN"
    assert said("rw", "huge=never") == "WARN"
    assert said("rw", "huge=advise") == "OK"
    assert said("rw", store_pipeline="Posix") == "OK"
