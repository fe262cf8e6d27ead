"""`cachestore gc`."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachestore_connector import instances, leftovers, manifest
from cachestore_connector.store import Store
from command_line import as_nobody, invoke, on_a_terminal
from disks import small_disk
from stored_pages import (
    blocks,
    dump,
    given,
    identity,
    keys,
    open_place,
    stored,
)


def run(*words, **more):
    return invoke("gc", *words, **more)


def collected(root, *words):
    done = run("--store", root, "--json", *(words or ["--yes"]))
    return done.exit_code, json.loads(done.stdout)


def left_behind(base, name="0123456789abcdef"):
    """What a killed store leaves in an identity's tmp."""
    path = base / "tmp" / name
    path.mkdir(parents=True)
    for file in ("lock", "17", "18-probe"):
        (path / file).write_bytes(bytes(5000))
    return path


def _root(options):
    return Path(options().storage_backends[0])


def snapshot(root):
    return sorted(map(str, root.rglob("*")))


@pytest.fixture
def untidy(options):
    """A store with blocks in which there is one of each: (root, the paths that may go)."""
    root = stored(options, keys(4))
    (base,) = root.iterdir()
    paths = {left_behind(base)}
    unlocked = base / "tmp" / "f" / "1"
    unlocked.parent.mkdir()
    unlocked.write_text("x")
    empty = base / "tmp" / "e"
    empty.mkdir()
    trash = base / "trash" / "abcd"
    (trash / "abc").mkdir(parents=True)
    (trash / "abc" / "block").write_bytes(bytes(9000))
    aside = blocks(root)[0].with_name("0" * 32 + ".aside-12")
    aside.write_text("damaged")
    going = root / ".going-1"
    (going / "blocks").mkdir(parents=True)
    old = root / "old-model.kv-1"
    (old / "blocks" / "abc").mkdir(parents=True)
    (old / "blocks" / "abc" / ("abc" + "0" * 29)).write_bytes(bytes(8192))
    (old / "identity.json").write_text('{"format_version": 2, "dtype": "bfloat16"}')
    unused = root / "unused-model.kv-2"
    (unused / "blocks" / "abc").mkdir(parents=True)
    (unused / "identity.json").write_text(
        manifest.describe(identity(model_identity="unused")).text()
    )
    (root / "notes").mkdir()  # somebody's own
    paths |= {unlocked.parent, empty, trash, aside, going, old, unused}
    return root, {str(path) for path in paths}


def test_all_that_is_left_goes_and_nothing_else(untidy):
    """Pinned: listed with bytes, dry until --yes; blocks, what others own, and newer stay."""
    root, paths = untidy
    before = snapshot(root)
    status, result = collected(root, "--dry-run")
    assert status == 0 and snapshot(root) == before
    found = {each["path"]: each for each in result["found"]}
    assert set(found) == paths
    trash = next(each for each in found.values() if each["kind"] == "trash")
    assert trash["bytes"] == 9000 and trash["allocated"] >= 9000
    old = next(each for each in found.values() if each["kind"] == "old")
    assert "format_version 2" in old["why"]
    plain = run("--store", root, "--dry-run").stdout
    assert all(path in plain for path in paths) and "\x1b" not in plain
    status, result = collected(root)
    assert status == 0 and set(result["removed"]) == paths
    assert all(not os.path.exists(path) for path in paths)
    assert len(blocks(root)) == 4 and (root / "notes").is_dir()
    assert "nothing to remove" in run("--store", root, "--yes").stdout


def test_what_is_open_stays(options):
    """Pinned: a store's own directory in tmp, and an identity of any version that one has open."""
    which = identity()
    root = _root(options)
    base = root / which.directory_name
    tidied = left_behind(base)
    store = Store(given(options, which))
    deadline = time.monotonic() + 60
    while tidied.exists():  # the store tidies up once, behind its opening
        assert time.monotonic() < deadline
        time.sleep(0.01)
    status, result = collected(root)
    assert status == 0 and not result["removed"]
    assert str(base) in [each["path"] for each in result["stays"]]
    assert dump(store, which, keys(3)) == [0] * 3
    (base / "identity.json").write_text('{"format_version": 1}')
    dead = left_behind(base)
    status, result = collected(root)
    assert result["removed"] == [str(dead)]
    assert len(blocks(root)) == 3 and "open" in result["stays"][0]["problem"]
    store.close()
    assert collected(root)[1]["removed"] == [str(base)]
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("other", [{"format_version": 4}, {"record_version": 3}, {}, []])
def test_what_is_newer_or_unknown_stays(options, other):
    """Pinned: blocks of a version that this one doesn't know are nobody's to remove."""
    root = stored(options, keys(2))
    (path,) = root.glob("*/identity.json")
    path.write_text(json.dumps({"format_version": 3, "store": other} if other else other))
    if "format_version" in other:
        path.write_text(json.dumps(other))
    assert collected(root)[1]["found"] == []
    assert len(blocks(root)) == 2


@pytest.mark.parametrize("step", range(5))
def test_an_identity_that_is_opened_while_it_goes_stays(options, monkeypatch, step):
    """Pinned: a store that opens it before a directory goes keeps what it stores, and all else."""
    which = identity()
    store = Store(given(options, which))
    dump(store, which, keys(2))
    store.clear()  # so that there is a mark
    store.close()
    root = _root(options)
    (base,) = root.iterdir()
    opened, rmdir, calls = [], os.rmdir, []

    def late(path, **more):
        calls.append(path)
        if len(calls) == step + 1:
            monkeypatch.setattr(os, "rmdir", rmdir)
            opened.append(Store(given(options, which)))
            assert dump(opened[0], which, keys(2)) == [0, 0]
        return rmdir(path, **more)

    monkeypatch.setattr(os, "rmdir", late)
    result = collected(root)[1]
    if not opened:  # it took fewer steps
        assert step == 4 and result["removed"] == [str(base)] and not base.exists()
        return
    assert result["removed"] == [] and "in use" in result["not_removed"][0]["problem"]
    (store,) = opened
    assert store.lookup(which.block_ids(keys(2))) == [True, True]
    assert dump(store, which, keys(4)) == [0] * 4
    store.close()
    assert len(blocks(root)) == 4
    assert {path.name for path in base.iterdir()} >= {"identity.json", "blocks"}
    assert not [path.name for path in base.iterdir() if path.name.startswith("identity.json.")]


def test_beside_stores_that_come_and_go(options):
    """Pinned: what a store has dumped is there while it is open, whatever else is removed."""
    root, wrong = _root(options), []
    root.mkdir()
    # Another process: in this one, stores would open between any two of its steps.
    script = (
        "import sys\n"
        "from cachestore_connector import leftovers\n"
        "removed = 0\n"
        "for line in sys.stdin:\n"
        "    for each in leftovers.find(sys.argv[1]).leftovers:\n"
        "        removed += leftovers.remove(each) == ''\n"
        "    print(removed, flush=True)\n"
    )
    command = [sys.executable, "-P", "-c", script, str(root)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as cleaner:
        for turn in range(150):
            cleaner.stdin.write("again\n")
            cleaner.stdin.flush()
            which = identity(model_identity=f"model-{turn % 3}")
            names = keys(3, start=turn)
            store = Store(given(options, which))
            codes = dump(store, which, names)
            found = store.lookup(which.block_ids(names))
            events = [event.text for event in store.events() if event.level > logging.INFO]
            store.clear()
            store.close()
            if codes != [0] * 3 or found != [True] * 3 or events:
                wrong.append((codes, found, events))
        cleaner.stdin.close()
        removed = int(cleaner.stdout.read().split()[-1])
    assert cleaner.returncode == 0
    assert wrong == [] and removed > 0


def test_locks_that_cannot_be_asked(untidy, monkeypatch):
    """Pinned: where nobody can tell whether a store is open, its files stay."""
    root, _ = untidy

    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(instances.fcntl, "fcntl", no_locks)
    result = collected(root)[1]
    kinds = {each["kind"] for each in result["found"]}
    # One without a lock file is nobody's, an identity without any store is not open.
    assert kinds == {"temporary", "trash", "aside", "going", "old", "empty"}
    left = next(root.glob("*/tmp/0123456789abcdef"))
    assert str(left) not in result["removed"]
    assert any("can't be told" in each["problem"] for each in result["stays"])


def test_a_store_that_starts_between_the_list_and_the_removal(options):
    """Pinned: its directory in tmp was taken for a dead one, and stays once it is locked."""
    root = stored(options, keys(1))
    (base,) = root.iterdir()
    dead = left_behind(base)
    (found,) = leftovers.find(root).leftovers
    with instances.taken(dead) as gone:
        assert gone
        assert instances.is_alive(dead)
        assert leftovers.remove(found) == "its store is open after all"
    assert (dead / "17").exists()
    assert leftovers.remove(found) == "" and not dead.exists()


def test_it_asks(untidy):
    """Pinned: no is no; where nobody can be asked it is an error, before anything is done."""
    root, paths = untidy
    before = snapshot(root)
    for words in ([], ["--json"]):
        done = run("--store", root, *words, input="y\n")
        assert done.exit_code == 3 and "--yes" in done.stderr
    status, said = on_a_terminal("gc", "--store", root, answer=b"n\n")
    assert status == 0 and "KiB" in said and snapshot(root) == before
    status, said = on_a_terminal("gc", "--store", root, answer=b"y\n")
    assert status == 0 and f"{len(paths)} removed" in said
    assert not any(map(os.path.exists, paths))


def test_no_store(tmp_path):
    """Pinned: an error, as everywhere."""
    assert run("--store", tmp_path / "none", "--yes").exit_code == 3


def test_someone_elses_store(options):
    """Pinned: nothing of it goes."""
    with open_place() as place:
        root = stored(options, keys(1), storage_backends=[str(place / "store")])
        left_behind(next(root.iterdir()))
        before = snapshot(root)
        assert as_nobody("gc", "--store", root, "--yes").returncode == 3
        root.chmod(0o755)
        done = as_nobody("gc", "--store", root, "--yes", "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["removed"] == [] and "Permission denied" in result["stays"][0]["problem"]
        assert snapshot(root) == before


def test_on_a_full_disk(options, tmp_path):
    """Pinned: it makes room there, also without an inode left."""
    with small_disk(tmp_path / "disk", "size=1m", "nr_inodes=200") as disk:
        root = stored(options, keys(4), storage_backends=[str(disk / "store")])
        base = next(root.iterdir())
        (base / "trash").mkdir(exist_ok=True)
        dead = left_behind(base)
        old = root / "old"
        (old / "blocks").mkdir(parents=True)
        (old / "blocks" / "x").write_bytes(bytes(4096))
        (old / "identity.json").write_text('{"format_version": 1}')
        with pytest.raises(OSError, match="No space"):
            for number in range(1000):
                (base / "trash" / str(number)).write_bytes(bytes(4096))
        status, result = collected(root)
        assert status == 0 and {str(dead), str(old)} < set(result["removed"])
        assert len(blocks(root)) == 4 and list((base / "trash").iterdir()) == []
