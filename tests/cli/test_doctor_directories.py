"""`cachestore doctor`: directories, space, inodes, O_DIRECT, and what is left over in them."""

import fcntl
import os
import struct
import threading

import pytest

import stored_pages
from cachestore_connector.cli import doctor_directories, doctor_left_over, doctor_space
from cachestore_connector.config import load
from cachestore_connector.mounts import Mount, mount_of
from cachestore_connector.store import Store
from disks import small_disk
from rig.server import poll

GIB = 1 << 30


def stored(options, pages):
    """A store in which so many pages lie; its directory."""
    return str(stored_pages.stored(options, stored_pages.keys(pages)))


def config(*paths, **given):
    return load({"storage_backends": [str(path) for path in paths], **given}, {})


def levels(findings, check):
    return [each.level.value for each in findings if each.check == check]


def test_a_directory_of_blocks_is_fine(options):
    """Pinned: a store in use, on a disk: nothing to warn of but what is left over."""
    root = stored(options, 3)
    found = doctor_directories.checks(config(root, posix_capacity_gb=0.001))
    assert {each.level.value for each in found} == {"OK"}, found
    assert any("blocks take" in each.what and "0 B" not in each.what for each in found)


def test_not_a_directory(tmp_path):
    """Pinned: a file in the place of the directory, or of one above it."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert doctor_directories.usable(str(path)).level == "FAIL"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert doctor_directories.usable(str(tmp_path / "link")).level == "FAIL"
    assert doctor_directories.usable(str(tmp_path / "not" / "yet")).level == "OK"
    assert not (tmp_path / "not").exists()


def test_read_only(tmp_path):
    """Pinned: a mount that can only be read fails, in words of its own."""
    with small_disk(tmp_path / "disk", "ro") as disk:
        found = doctor_directories.usable(str(disk))
    assert found.level == "FAIL" and "mount it for writing" in found.do


def test_full(tmp_path):
    """Pinned: a disk with no room left, and one with no inode left."""
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        (disk / "big").write_bytes(bytes(65536))
        found = doctor_directories.usable(str(disk))
        assert found.level == "FAIL" and "posix_capacity_gb" in found.do
    with small_disk(tmp_path / "disk", "size=8m,nr_inodes=50") as disk:
        found = doctor_space.checks(config(disk), 0, str(disk), str(disk))
        assert levels(found, "inodes") == ["FAIL"]


def test_tmpfs_is_warned_of(tmp_path):
    """Pinned: blocks in memory are a mistake more often than not."""
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        found = doctor_directories.checks(config(disk, posix_capacity_gb=1))
        assert levels(found, "file system") == ["WARN"]
        assert levels(found, "disk space") == ["FAIL"]  # 1 GiB of 8 MiB


def test_the_same_directory_twice(tmp_path):
    """Pinned: a link to another entry fails, as the server would."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (found,) = doctor_directories.same((str(tmp_path / "a"), str(tmp_path / "b")))
    assert found.level == "FAIL"


def test_one_disk_for_several(tmp_path):
    """Pinned: a warning; a failure if the capacities together are more than the disk."""
    paths = tmp_path / "a", tmp_path / "b"
    assert [f.level.value for f in doctor_space.shared_disks(config(*paths))] == ["WARN"]
    total = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize / GIB
    found = doctor_space.shared_disks(config(*paths, posix_capacity_gb=total * 1.5))
    assert [f.level.value for f in found] == ["FAIL"]


def test_everybody_may_write(tmp_path):
    """Pinned: mode 0777 without the sticky bit is warned of."""
    tmp_path.chmod(0o777)
    assert [f.level.value for f in doctor_directories.protection(str(tmp_path))] == ["WARN"]
    tmp_path.chmod(0o1777)
    assert doctor_directories.protection(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("kind", "options", "zero_copy", "level", "part"),
    [
        ("ext4", "rw", "auto", "OK", "straight"),
        ("ext4", "rw", "never", "OK", "through buffers"),
        ("overlay", "rw", "auto", "WARN", "docker run -v"),
        ("nfs4", "rw,hard", "auto", "OK", "network file system"),
        ("nfs", "rw,nolock", "auto", "WARN", "nolock"),
        ("nfs4", "rw,local_lock=all", "auto", "WARN", "local_lock"),
        ("fuse.juicefs", "rw", "always", "WARN", "posix_zero_copy: auto"),
        ("strange", "rw", "auto", "OK", "not known to be local"),
    ],
)
def test_file_systems(kind, options, zero_copy, level, part):
    """Pinned: what is said of each kind."""
    mount = Mount("/mnt", kind, "server:/", frozenset(options.split(",")))
    found = doctor_directories.file_system("/mnt/kv", mount, zero_copy)
    assert found.level == level and part in found.what + found.do


def test_local_file_systems_are_the_native_ones():
    """Pinned: what is called local here is what native/src/posix/directory.cc calls so."""
    from pathlib import Path

    from cachestore_connector import mounts

    source = Path(__file__).resolve().parents[2] / "native/src/posix/directory.cc"
    text = source.read_text()
    body = text[text.index("bool IsSureToEnd") : text.index("return true;")]
    named = {
        word.strip(", ")
        for line in body.splitlines()
        if "//" in line
        for word in line.split("//")[1].replace("overlayfs, as in containers", "overlay").split(",")
    }
    assert named - {""} == {name for name in mounts._LOCAL}


def test_the_mount_of_a_path(tmp_path):
    """Pinned: the longest one that is above the path, of two on one point the later."""
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        r"2 1 0:5 / /mnt/with\040blank rw - nfs4 host:/x rw,nolock" + "\n"
        "3 1 0:6 / /mnt/n rw - xfs /dev/b rw\n"
        "4 3 0:7 / /mnt/n ro - btrfs /dev/c rw\n"
        "nonsense\n"
    )
    assert mount_of("/mnt/with blank/kv", str(table)).kind == "nfs4"
    assert mount_of("/mnt/n/kv", str(table)).kind == "btrfs"
    assert mount_of("/mnt/n/kv", str(table)).is_read_only
    assert mount_of("/mnt/nn", str(table)).kind == "ext4"
    assert mount_of("/x", str(tmp_path / "none")) is None


def test_direct_io(tmp_path, monkeypatch):
    """Pinned: a refusal fails where it is required, warns where it is wanted, else is no matter."""
    path = str(tmp_path)
    tried = doctor_directories.try_direct(path)
    assert tried is None or isinstance(tried, str)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor_directories, "try_direct", lambda _: "Invalid argument")
    said = {each: doctor_directories.direct_io(path, each) for each in (False, True, "required")}
    assert [said[each].level.value for each in said] == ["OK", "WARN", "FAIL"]
    monkeypatch.setattr(doctor_directories, "try_direct", lambda _: None)
    assert doctor_directories.direct_io(path, "required").level == "OK"


def space(**changed):
    given = {"capacity": None, "reserve": 0, "total": 100 * GIB, "free": 60 * GIB}
    return doctor_space.space("/d", **given | {"used": 20 * GIB, "used_is_all": True} | changed)


def test_space():
    """Pinned: what the disk has beside what the settings want."""
    assert space().level == "OK"
    assert space(capacity=80 * GIB).level == "OK"  # free and used by blocks
    assert space(capacity=81 * GIB).level == "WARN"  # others have the rest
    assert space(capacity=81 * GIB, used_is_all=False).level == "OK"  # can't be told
    assert space(capacity=101 * GIB).level == "FAIL"
    assert space(capacity=95 * GIB, reserve=10 * GIB).level == "FAIL"
    assert space(reserve=100 * GIB).level == "FAIL"
    assert space(reserve=58 * GIB).level == "WARN"
    assert space(free=GIB // 2).level == "WARN"


def test_what_the_collector_says_is_used(tmp_path):
    """Pinned: its figure is taken; nonsense in its place is not."""
    (tmp_path / "collector").mkdir()
    state = tmp_path / "collector" / "state"
    state.write_text("cachestore-collector 1\nused 4096\nfiles 1\ngrant ab 5\n")
    assert doctor_space.stored(str(tmp_path)) == (4096, 1, True)
    state.write_text("used much\n")
    assert doctor_space.stored(str(tmp_path)) == (0, 0, True)


def test_other_limits(options):
    """Pinned: what a running store evicts by is compared; nobody's state is history."""
    which = stored_pages.identity()
    given = stored_pages.given(options, which, posix_capacities=[GIB])
    (root,) = given.storage_backends
    store = Store(given)
    try:
        stored_pages.dump(store, which, stored_pages.keys(2))
        state = os.path.join(root, "collector", "state")
        poll(lambda: os.path.exists(state), 10, "the collector's state", interval=0.01)

        def said(**limits):
            found = doctor_directories.checks(config(root, **limits))
            return [each.what for each in found if each.check == "eviction"]

        assert said(posix_capacity_gb=1) == []
        (other,) = said(posix_capacity_gb=2, posix_low_watermark_percent=50)
        assert f"capacity {GIB:,}, not {2 * GIB:,}" in other and "low_watermark" in other
    finally:
        store.close()
    assert said(posix_capacity_gb=2) == []


def test_too_few_inodes():
    """Pinned: fewer than blocks to come warns; a file system that makes them has none to count."""
    given = {"total": 10**6, "bytes_to_come": 100 * GIB, "file_size": 1 << 20}
    assert doctor_space.inodes("/d", free=10**5, **given).level == "WARN"
    assert doctor_space.inodes("/d", free=10**6, **given).level == "OK"
    assert doctor_space.inodes("/d", free=0, **given | {"total": 0}).level == "OK"


def test_a_mount_that_hangs(tmp_path, monkeypatch):
    """Pinned: it is given up after a bound, and said to hang."""
    gate = threading.Event()
    monkeypatch.setattr(doctor_directories, "usable", lambda _: gate.wait())
    (found,) = doctor_directories.checks(config(tmp_path), patience=0.1)
    gate.set()
    assert found.level == "FAIL" and "no answer" in found.what


def test_a_directory_that_fails(tmp_path, monkeypatch):
    """Pinned: an error of the disk is a finding; a mistake of ours isn't taken for one."""

    def fails(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor_directories, "usable", fails)
    (found,) = doctor_directories.checks(config(tmp_path))
    assert found.level == "FAIL" and "Input/output error" in found.what
    monkeypatch.setattr(doctor_directories, "usable", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        doctor_directories.checks(config(tmp_path))


def test_left_over_in_a_store(options):
    """Pinned: what a killed writer left is told from what a live one has, by its lock."""
    root = stored(options, 1)
    (identity,) = [
        p
        for p in map(lambda n: os.path.join(root, n), os.listdir(root))
        if os.path.isdir(os.path.join(p, "blocks"))
    ]
    (fine,) = doctor_left_over.in_directory(root)
    assert fine.level == "OK"
    for name in ("dead", "alive"):
        os.makedirs(f"{identity}/tmp/{name}")
        open(f"{identity}/tmp/{name}/lock", "w").close()
    os.makedirs(f"{identity}/trash/1")
    with open(f"{identity}/tmp/alive/lock", "r+") as held:
        lock(held)
        found = doctor_left_over.in_directory(root)
    whats = [each.what for each in found]
    assert len(found) == 2
    assert "1 directory of temporary files" in whats[0] and "tmp/dead" in whats[0]
    assert "trash" in whats[1]


def test_a_damaged_store(options):
    """Pinned: a manifest that isn't one, and files that are no blocks, are said or passed by."""
    root = stored(options, 2)
    (identity,) = [each.path for each in doctor_left_over.on_disk.identities(root)]
    (identity / "identity.json").write_bytes(b"\xff{")
    (identity / "blocks" / "junk").write_text("x")
    (identity / "tmp").rmdir()
    (identity / "tmp").write_text("not a directory")
    (found,) = doctor_left_over.in_directory(root)
    assert found.level == "WARN" and "identity.json" in found.what
    assert {each.level.value for each in doctor_directories.checks(config(root))} <= {"OK", "WARN"}


def lock(file, first=0, count=0):
    range_ = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, range_)


def test_left_over_buffers(tmp_path):
    """Pinned: a buffer that nobody holds is told from one in use; other files are left alone."""
    assert doctor_left_over.segments(str(tmp_path))[0].level == "OK"
    names = [f"cachestore-region-{os.geteuid()}-{digit * 32}" for digit in "ab"]
    for name in [*names, "cachestore-region-0-short", "other"]:
        (tmp_path / name).write_bytes(bytes(8192))
    with open(tmp_path / names[1], "r+b") as held:
        lock(held, 16 + 5, 1)  # process 5
        (found,) = doctor_left_over.segments(str(tmp_path))
    assert found.level == "WARN"
    assert names[0] in found.what and names[1] not in found.what and "8.0 KiB" in found.what


def test_a_live_buffer_is_not_left_over(options, tmp_path):
    """Pinned: by the native side's own locks: a store's buffer is in use, and gone at close."""
    store = Store(
        options(
            pipeline="Cache|Posix",
            shard_size=4096,
            block_size=4096,
            cache_buffer_directory=str(tmp_path),
            cache_buffer_capacity=1 << 20,
        )
    )
    (found,) = doctor_left_over.segments(str(tmp_path))
    assert found.level == "OK" and "1 in use" in found.what
    store.close()


def test_files_of_counters_of_the_dead(tmp_path):
    """Pinned: those whose process is gone."""
    below = tmp_path / f"cachestore-stats-{os.geteuid()}"
    below.mkdir()
    (below / f"{os.getpid()}-0.json").touch()
    assert len(doctor_left_over.segments(str(tmp_path))) == 1
    (below / "4194999-0.json").touch()
    found = doctor_left_over.segments(str(tmp_path))[1]
    assert found.level == "WARN" and "4194999-0.json" in found.what
