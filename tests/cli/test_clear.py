"""`cachestore clear`."""

import json
import os
import threading
from pathlib import Path

import pytest

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

RANKS = [identity(tp_rank=rank, tp_size=2) for rank in range(2)]
OTHER = identity(model_identity="tests/other")


def run(*words, **more):
    return invoke("clear", *words, **more)


def cleared(root, *names):
    words = [word for name in names for word in ("--identity", name)]
    done = run("--store", root, *words, "--yes", "--json")
    return done.exit_code, json.loads(done.stdout)


def root_of(root, which):
    return Path(root, which.directory_name)


def names_left(root):
    return {path.parents[2].name for path in blocks(root)}


def test_by_cache_by_directory_or_all(options):
    """Pinned: all of a cache's pools and ranks, one of them, or everything; and nothing else."""
    for given_names, left in (
        ([RANKS[0].directory_name.rpartition(".")[0]], {OTHER.directory_name}),
        ([RANKS[0].directory_name], {RANKS[1].directory_name, OTHER.directory_name}),
        ([RANKS[0].directory_name, OTHER.directory_name], {RANKS[1].directory_name}),
        (["all"], set()),
    ):
        root = stored(options, keys(3), *RANKS, OTHER)
        status, result = cleared(root, *given_names)
        assert status == 0 and names_left(root) == left
        assert len(result["cleared"]) == 3 - len(left)
        assert all(each["blocks"] == 3 for each in result["identities"])
        assert all(each["open"] is False for each in result["identities"])
        # Nothing stays behind but the mark, readable by nobody else.
        for path in map(root.joinpath, {OTHER.directory_name, RANKS[0].directory_name} - left):
            assert not list((path / "trash").iterdir()) and not list((path / "tmp").iterdir())
            assert (path / "cleared").stat().st_mode & 0o777 == 0o600
            assert (path / "trash").stat().st_mode & 0o777 == 0o700
        cleared(root, "all")


def test_dry_run_and_names_that_are_none(options, tmp_path):
    """Pinned: a list of what would go, at 80 columns, and no change; what there is, by name."""
    root = stored(options, keys(3), *RANKS)
    before = sorted(root.rglob("*"))
    done = run("--store", root, "--identity", "all", "--dry-run")
    assert done.exit_code == 0 and sorted(root.rglob("*")) == before
    assert "\x1b" not in done.stdout and all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "nothing was cleared" in done.stdout and "36.0 KiB" not in done.stdout.splitlines()[0]
    done = run("--store", root, "--identity", "llama", "--yes")
    assert done.exit_code == 3
    assert RANKS[0].directory_name.rpartition(".")[0] in done.stderr
    assert sorted(root.rglob("*")) == before
    assert run("--store", tmp_path / "no", "--identity", "all", "--yes").exit_code == 3
    assert run("--store", root).exit_code == 2


def test_names_stay_whole(options):
    """Pinned: whatever is asked about is named in one piece, however long its name is."""
    which = identity(model_identity="tests/" + "a-long-name-" * 6)
    root = stored(options, keys(1), which)
    for command in ("clear", "du"):
        more = ("--identity", "all", "--dry-run") if command == "clear" else ()
        printed = invoke(command, "--store", root, *more).stdout
        assert which.directory_name.rpartition(".")[0] in printed, command


def test_it_asks(options):
    """Pinned: no is no; where nobody can be asked it is an error."""
    root = stored(options, keys(3))
    words = ("--store", root, "--identity", "all")
    done = run(*words, input="y\n")
    assert done.exit_code == 3 and "--yes" in done.stderr and len(blocks(root)) == 3
    status, _ = on_a_terminal("clear", *words, answer=b"\n")
    assert status == 0 and len(blocks(root)) == 3
    status, said = on_a_terminal("clear", *words, answer=b"y\n")
    assert status == 0 and not blocks(root) and "1 cleared" in said


def test_beside_an_open_store(options):
    """Pinned: it notices: what was there isn't, what is stored afterwards is; others' stays."""
    which, names = identity(), keys(20)
    store, other = Store(given(options, which)), Store(given(options, OTHER))
    for each, its in ((store, which), (other, OTHER)):
        assert dump(each, its, names) == [0] * 20
    root = given(options, which).storage_backends[0]
    status, result = cleared(root, which.directory_name)
    assert status == 0 and result["identities"][0]["open"] is True
    assert store.lookup(which.block_ids(names)) == [False] * 20
    assert dump(store, which, names[:5], seed=2) == [0] * 5
    assert store.lookup(which.block_ids(names)) == [True] * 5 + [False] * 15
    assert other.lookup(OTHER.block_ids(names)) == [True] * 20
    assert len(list((root_of(root, which) / "tmp").iterdir())) == 1  # the store's own
    store.close()
    other.close()


def test_its_mark_is_later_than_the_one_before(options):
    """Pinned: whatever the clock says, as what a store stored since then may be later than it."""
    which, names = identity(), keys(3)
    store = Store(given(options, which))
    root = given(options, which).storage_backends[0]
    mark = root_of(root, which) / "cleared"
    for ahead in (0, 10**10, 2 * 10**10):
        assert cleared(root, which.directory_name)[0] == 0
        before = mark.stat().st_mtime_ns + ahead
        os.utime(mark, ns=(before, before))
        assert cleared(root, which.directory_name)[0] == 0
        assert mark.stat().st_mtime_ns > before
        assert store.lookup(which.block_ids(names)) == [False] * 3
        assert dump(store, which, names) == [0] * 3
        assert store.lookup(which.block_ids(names)) == [True] * 3
    store.close()


def test_what_was_accepted_before_does_not_come_back(options, tmp_path):
    """Pinned: pages that a server has only in its buffer aren't stored or served afterwards."""
    which, names = identity(), keys(200)
    changes = {
        "pipeline": "Cache|Posix",
        "cache_buffer_directory": str(tmp_path),
        "cache_buffer_capacity": 16 << 20,
        "posix_dump_worker_number": 1,
        "posix_queue_depth": 512,
        "cache_dirty_percent": 87,
    }
    root = given(options, which).storage_backends[0]
    dirty = 0
    for turn in range(4):
        store = Store(given(options, which, **changes))
        assert dump(store, which, names, seed=turn) == [0] * 200
        dirty += store.stats()["cache_slots_dirty"]
        assert cleared(root, "all")[0] == 0
        assert store.lookup(which.block_ids(names)) == [False] * 200  # nor in its buffer
        store.close()
        assert blocks(root) == []
    assert dirty > 0  # else this shows nothing


def test_beside_stores_that_are_dumped_to_and_cleared(options):
    """Pinned: both at once, again and again: no error, nothing is lost of what comes after."""
    which, wrong = identity(), []
    store = Store(given(options, which))
    root = given(options, which).storage_backends[0]

    def turns(start, allowed):
        """Some for each clear by the command line: else what that removes could grow for ever."""
        while allowed.acquire() and not ended.is_set():
            codes = dump(store, which, keys(16, start))
            if codes != [0] * 16:
                wrong.append((codes, [event.text for event in store.events()]))
            if start == 0:
                store.clear()

    ended = threading.Event()
    busy = {start: threading.Semaphore(0) for start in (0, 100)}
    threads = [threading.Thread(target=turns, args=each) for each in busy.items()]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            for allowed in busy.values():
                allowed.release(5)
            status, result = cleared(root, "all")
            assert status == 0, result
    finally:
        ended.set()
        for allowed, thread in zip(busy.values(), threads, strict=True):
            allowed.release()
            thread.join()
    assert wrong == []
    cleared(root, "all")
    assert blocks(root) == []
    assert dump(store, which, keys(16)) == [0] * 16
    assert store.lookup(which.block_ids(keys(16))) == [True] * 16
    store.close()
    assert not list((root_of(root, which) / "trash").iterdir())


def test_a_block_that_arrives_late(options, monkeypatch):
    """Pinned: one whose directory was cleared while it was published is removed with the rest."""
    root, rmdir, late = stored(options, keys(3)), os.rmdir, []

    def filled(path, **more):
        if "trash" in str(path) and not late:
            late.append(Path(path, "late"))
            late[0].touch()
        return rmdir(path, **more)

    monkeypatch.setattr(os, "rmdir", filled)
    assert cleared(root, "all")[0] == 0
    assert late and not list(root.glob("*/trash/*"))


def test_damaged_and_nameless_caches(options):
    """Pinned: what can't be read can be cleared."""
    root = stored(options, keys(3))
    (path,) = root.glob("*/identity.json")
    path.write_text("{")
    assert cleared(root, path.parent.name)[0] == 0 and blocks(root) == []


def test_links_are_not_followed(options, tmp_path):
    """Pinned: what lies elsewhere stays, whatever leads there."""
    root = stored(options, keys(3))
    (base,) = root.iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    (root / "link.kv-1").symlink_to(base)
    trash = base / "trash"
    if trash.is_dir():
        trash.rmdir()
    trash.symlink_to(elsewhere)
    (base / "blocks" / "abc").mkdir(exist_ok=True)
    (base / "blocks" / "abc" / "link").symlink_to(elsewhere)
    status, result = cleared(root, "all")
    assert status == 0 and [each["path"] for each in result["identities"]] == [str(base)]
    assert (elsewhere / "mine").read_text() == "mine" and os.listdir(elsewhere) == ["mine"]


def test_someone_elses_store(options):
    """Pinned: an error, with the path; nothing changes."""
    with open_place() as place:
        root = stored(options, keys(1), storage_backends=[str(place / "store")])
        words = ("clear", "--store", root, "--identity", "all", "--yes")
        assert as_nobody(*words).returncode == 3
        root.chmod(0o755)
        done = as_nobody(*words)
        assert done.returncode == 3 and "Permission denied" in done.stdout + done.stderr
        assert len(blocks(root)) == 1


def test_on_a_full_disk(options, tmp_path):
    """Pinned: it makes room also where there is none for its mark, not even an inode."""
    which = identity()
    with small_disk(tmp_path / "disk", "size=4m", "nr_inodes=60") as disk:
        changes = {"storage_backends": [str(disk / "store")]}
        root = stored(options, keys(4), **changes)
        store = Store(given(options, which, **changes))
        with pytest.raises(OSError, match="No space"):
            for number in range(1000):
                (disk / str(number)).touch()
        status, result = cleared(root, "all")
        assert status == 0, result
        assert blocks(root) == [] and (root_of(root, which) / "cleared").exists()
        assert store.lookup(which.block_ids(keys(4))) == [False] * 4
        store.close()
