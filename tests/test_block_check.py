"""Checking and removing single blocks, while others change what is there."""

import errno
import os
import struct
import threading
from pathlib import Path

import pytest
from crc32c import crc32c

from backends import flip
from cachestore_connector import block_check, on_disk
from cachestore_connector.block_check import Checker, RateLimit, State, Stopped
from stored_pages import FILE, SIZES, blocks, identity, keys, stored


@pytest.fixture
def one(options):
    """A block, and the manifest of its directory."""
    root = stored(options, keys(1))
    (path,) = blocks(root)
    (found,) = on_disk.identities(root)
    return path, found.manifest


def replace(path, content):
    """As a store publishes: a new file takes the name."""
    new = path.with_name("new")
    new.write_bytes(content)
    os.rename(new, path)


def test_what_a_record_says(one):
    """Pinned: every field, by docs/format.md; each tensor's checksum over the file's bytes."""
    path, described = one
    checked = Checker().check(path, described)
    assert (checked.state, checked.problem, checked.size) == (State.RIGHT, "", FILE)
    record, content = checked.record, path.read_bytes()
    assert record.tensor_sizes == tuple(SIZES) and record.shards == 1
    assert record.payload == sum(SIZES) and record.stride == 8192
    assert record.block_id.hex() == path.name
    assert record.fingerprint == described.fingerprint
    assert record.checksums == (crc32c(content[:5000]), crc32c(content[5000:8192]))


def test_blocks_of_several_shards_and_long_tensors(options):
    """Pinned: tensors that go on over the pieces it is read in, and shards with padding each."""
    sizes = [3 << 20, (1 << 20) - 5, 100]
    which = identity(tensor_sizes=sizes)
    root = stored(options, keys(1), which)
    (path,) = blocks(root)
    assert Checker().check(path, None).state is State.RIGHT
    for at in (0, (1 << 20) - 1, 1 << 20, (3 << 20) + 1, (4 << 20) + 94):
        flip(path, at)
        number = sum(at >= end for end in (sizes[0], sizes[0] + sizes[1]))
        assert Checker().check(path, None).wrong == (number,)
        flip(path, at)
    # Two shards, written by hand.
    shards = [bytes([n]) * 137 + bytes(3959) for n in (1, 2)]
    sums = [crc32c(part) for shard in shards for part in (shard[:100], shard[100:])]
    head = struct.pack(
        "<8sII32s16s16sQQIIIIQQ4I",
        b"CSBLOCK1", 2, 4096, bytes(32), bytes.fromhex(path.name), bytes(16), 274, 4096, 2, 2, 1, 0,
        100, 37, *sums,
    )  # fmt: skip
    record = head + bytes(4092 - len(head))
    content = b"".join(shards) + record + struct.pack("<I", crc32c(record))
    path.write_bytes(content)
    assert Checker().check(path, None).state is State.RIGHT
    flip(path, 4096 + 120)
    assert Checker().check(path, None).problem == "checksum of tensor 1 of shard 1 differs"


def test_sizes_in_a_record_are_not_trusted(one):
    """Pinned: a right checksum over senseless sizes is damage, not an exception or much memory."""
    path, described = one
    content = path.read_bytes()
    for at, form, value in [
        (96, "<I", 0), (96, "<I", 2**32 - 1), (100, "<I", 0), (100, "<I", 2**32 - 1),
        (88, "<Q", 2**63), (88, "<Q", 0), (88, "<Q", 8191), (112, "<Q", 2**64 - 1), (80, "<Q", 7),
        (104, "<I", 2), (12, "<I", 512),
    ]:  # fmt: skip
        record = bytearray(content[-4096:])
        struct.pack_into(form, record, at, value)
        struct.pack_into("<I", record, 4092, crc32c(bytes(record[:4092])))
        path.write_bytes(content[:-4096] + record)
        for known in (described, None):
            assert Checker().check(path, known).state is State.DAMAGED, (at, value)


def test_another_version_is_damage_only_among_this_ones(one):
    """Pinned: what says that it is of another version can't be judged where no manifest says."""
    path, described = one
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, FILE - 4096 + 8, 3)
    struct.pack_into("<I", content, FILE - 4, crc32c(bytes(content[-4096:-4])))
    path.write_bytes(content)
    assert Checker().check(path, described).state is State.DAMAGED
    assert Checker().check(path, None).state is State.UNKNOWN
    assert Checker().remove_damaged(path, None).state is State.UNKNOWN and path.exists()


def test_replaced_while_it_is_read(one, monkeypatch):
    """Pinned: the damage of a file that has lost its name is nobody's; the new one is looked at."""
    path, described = one
    right = path.read_bytes()
    flip(path)
    read = Checker._read

    def replaced(self, *arguments):
        monkeypatch.setattr(Checker, "_read", read)
        replace(path, right)
        return read(self, *arguments)

    monkeypatch.setattr(Checker, "_read", replaced)
    assert Checker().check(path, described).state is State.RIGHT
    flip(path)

    def removed(self, *arguments):
        path.unlink(missing_ok=True)
        return read(self, *arguments)

    monkeypatch.setattr(Checker, "_read", removed)
    assert Checker().check(path, described).state is State.GONE


def test_only_the_file_that_was_checked_is_removed(one, monkeypatch):
    """Pinned: one that takes its name just before it goes keeps it, whatever inode it has."""
    path, described = one
    right = path.read_bytes()
    flip(path)
    rename = os.rename

    def late(source, *arguments, **more):
        monkeypatch.setattr(os, "rename", rename)
        replace(path, right)
        return rename(source, *arguments, **more)

    monkeypatch.setattr(os, "rename", late)
    assert Checker().remove_damaged(path, described).state is State.GONE
    assert path.read_bytes() == right
    assert os.listdir(path.parent) == [path.name]


def test_what_is_put_back_does_not_outlive_a_clear(one, monkeypatch):
    """Pinned: a clear that comes between takes it along."""
    path, described = one
    right = path.read_bytes()
    flip(path)
    rename, link = os.rename, os.link

    def late(source, *arguments, **more):
        monkeypatch.setattr(os, "rename", rename)
        replace(path, right)
        return rename(source, *arguments, **more)

    def cleared(*arguments, **more):
        tree = path.parents[1]
        rename(tree, tree.with_name("trash"))
        path.parent.mkdir(parents=True)
        return link(*arguments, **more)

    monkeypatch.setattr(os, "rename", late)
    monkeypatch.setattr(os, "link", cleared)
    assert Checker().remove_damaged(path, described).state is State.GONE
    assert os.listdir(path.parent) == []


def test_a_right_block_is_not_removed(one):
    """Pinned: it is checked once more before it goes; and what is gone is no error."""
    path, described = one
    assert Checker().remove_damaged(path, described).state is State.RIGHT
    assert path.exists()
    path.unlink()
    assert Checker().remove_damaged(path, described).state is State.GONE


def test_a_device_that_fails(one, monkeypatch):
    """Pinned: an error of the system is no damage: the block stays, as the error may pass."""
    path, described = one

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    checked = Checker().remove_damaged(path, described)
    assert checked.state is State.UNREADABLE and "Input/output error" in checked.problem
    assert path.exists()


def test_where_direct_io_is_refused(one, monkeypatch):
    """Pinned: at the open or at the read, it goes on through the page cache."""
    path, described = one
    opened, read = os.open, os.preadv
    direct = []

    def refuse(fd, *arguments):
        import fcntl

        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if direct[-1]:
            raise OSError(errno.EINVAL, "no")
        return read(fd, *arguments)

    monkeypatch.setattr(os, "preadv", refuse)
    assert Checker().check(path, described).state is State.RIGHT
    assert direct[-1] is False

    def refuse_open(name, flags, *arguments, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return opened(name, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse_open)
    assert Checker().check(path, described).state is State.RIGHT


def test_the_rate_is_of_all_threads_together():
    """Pinned: reads wait, so that no more than the rate is read; no rate is saved up."""
    now, waited = [100.0], []
    limit = RateLimit(1000, waited.append, lambda: now[0])
    limit.take(500)
    assert waited == []
    limit.take(250)
    assert waited == [0.5]
    limit.take(250)
    assert waited == [0.5, 0.75]
    now[0] = 200.0
    limit.take(10**6)
    assert len(waited) == 2
    limit.take(1)
    assert waited[2] == 1000


def test_a_stop_ends_a_check_that_waits(one):
    """Pinned: at a low rate too."""
    path, described = one
    checker = Checker(rate=1)
    ended = []

    def check():
        try:
            checker.check(path, described)
        except Stopped:
            ended.append(True)

    thread = threading.Thread(target=check)
    thread.start()
    checker.stop()
    thread.join(10)
    assert ended == [True]


def test_directories_and_links_in_a_blocks_place(one, tmp_path):
    """Pinned: a link goes, what it leads to stays; a directory is the store's to move away."""
    path, described = one
    target = tmp_path / "target"
    os.rename(path, target)
    path.symlink_to(target)
    assert Checker().remove_damaged(path, described).state is State.DAMAGED
    assert target.exists() and not os.path.lexists(path)
    path.mkdir()
    assert Checker().check(path, described).state is State.DAMAGED
    with pytest.raises(IsADirectoryError):
        Checker().remove_damaged(path, described)
    assert Path(path).is_dir()
    assert block_check.ASIDE not in "".join(os.listdir(path.parent))
