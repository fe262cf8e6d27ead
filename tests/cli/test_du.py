"""`cachestore du`."""

import json
import os
import subprocess

from cachestore_connector.store import Store
from command_line import as_nobody, invoke
from disks import fill, small_disk
from stored_pages import FILE, given, identity, keys, open_place, stored


def run(*words):
    return invoke("du", *words)


def counted(root):
    done = run("--store", root, "--json")
    (each,) = json.loads(done.stdout)
    return done.exit_code, each


def test_everything_is_counted_where_it_belongs(options):
    """Pinned: blocks by identity, tmp, trash, the collector's, others'; in all as `du` counts."""
    ranks = [identity(tp_rank=rank, tp_size=2) for rank in range(2)]
    root = stored(options, keys(5), *ranks, posix_capacities=[1 << 30])
    first = root / ranks[0].directory_name
    (first / "trash" / "x").mkdir(parents=True)
    (first / "trash" / "x" / "block").write_bytes(bytes(10000))
    (first / "tmp" / "left").mkdir()
    (first / "tmp" / "left" / "1").write_bytes(bytes(5000))
    (root / "notes").write_text("mine")
    status, each = counted(root)
    assert status == 0
    mine, other = sorted(each["identities"], key=lambda found: found["path"] != str(first))
    assert mine["model"] == "tests/llama" and mine["pool"] == "kv"
    for found in (mine, other):
        assert found["blocks"]["files"] == 5 and found["blocks"]["bytes"] == 5 * FILE
        assert found["blocks"]["allocated"] >= 5 * FILE
        assert found["blocks"]["inodes"] > 5  # directories too
    assert mine["trash"]["bytes"] == 10000 and mine["temporary"]["bytes"] == 5000
    assert other["trash"]["files"] == other["temporary"]["files"] == 0
    assert each["collector"]["files"] >= 1
    assert (each["other"]["files"], each["other"]["bytes"]) == (1, 4)
    total = subprocess.run(["du", "-s", "-B1", root], capture_output=True, text=True)
    assert each["total"]["allocated"] == int(total.stdout.split()[0])
    inodes = subprocess.run(["du", "-s", "--inodes", root], capture_output=True, text=True)
    assert each["total"]["inodes"] == int(inodes.stdout.split()[0])
    disk = os.statvfs(root)
    assert each["filesystem"]["size"] == disk.f_blocks * disk.f_frsize
    plain = run("--store", root).stdout
    for word in ("being written", "cleared", "collector", "other files", "inodes"):
        assert word in plain
    assert "\x1b" not in plain
    table = [line for line in plain.splitlines() if not line.startswith("/")]
    assert all(len(line) <= 80 for line in table)
    assert plain.count("llama-") == 1  # both ranks in one line


def test_beside_an_open_store(options):
    """Pinned: what it has in tmp is counted there."""
    root = stored(options, keys(1))
    store = Store(given(options, identity()))
    (found,) = counted(root)[1]["identities"]
    assert found["temporary"]["inodes"] > 1
    store.close()


def test_damage_and_no_store(options, tmp_path):
    """Pinned: a manifest that can't be read doesn't keep it from counting; no store is an error."""
    root = stored(options, keys(3))
    (path,) = root.glob("*/identity.json")
    path.write_text("{")
    status, each = counted(root)
    assert status == 0 and each["identities"][0]["blocks"]["files"] == 3
    assert each["identities"][0]["model"] is None
    done = run("--store", tmp_path / "none")
    assert done.exit_code == 3 and "none" in done.stderr
    assert "error" in json.loads(run("--store", tmp_path / "none", "--json").stdout)


def test_someone_elses_store(options):
    """Pinned: what can't be counted is said, and is no crash."""
    with open_place() as place:
        root = stored(options, keys(2), storage_backends=[str(place / "store")])
        assert as_nobody("du", "--store", root).returncode == 3
        root.chmod(0o755)
        (root / "lost+found").mkdir(mode=0o700)  # nobody's to read: no word of it
        done = as_nobody("du", "--store", root, "--json")
        assert done.returncode == 1, done.stderr
        (each,) = json.loads(done.stdout)
        assert not each["identities"]
        assert [found["problem"] for found in each["problems"]] == ["Permission denied"]


def test_a_full_disk(options, tmp_path):
    """Pinned: nothing is free, and it says so; nothing is written."""
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        root = stored(options, keys(2), storage_backends=[str(disk / "store")])
        fill(disk)
        status, each = counted(root)
        assert status == 0 and each["filesystem"]["free"] == 0
        assert "free: 0 B of 1.0 MiB" in run("--store", root).stdout
