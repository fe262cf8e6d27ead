"""`cachestore verify`."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from backends import flip
from cachestore_connector.store import Store
from command_line import as_nobody, invoke, on_a_terminal
from disks import fill, small_disk
from rig.server import poll
from stored_pages import (
    FILE,
    blocks,
    dump,
    given,
    identity,
    keys,
    open_place,
    stored,
)


def run(*words, **more):
    return invoke("verify", *words, **more)


def found(*words):
    done = run(*words, "--json")
    return done.exit_code, json.loads(done.stdout)


def test_a_whole_store_is_right(options):
    """Pinned: every block is read and none is damaged; the state file is gone; plain in a pipe."""
    root = stored(options, keys(9))
    status, result = found("--store", root)
    assert status == 0
    assert (result["blocks"], result["bytes"]) == (9, 9 * FILE)
    assert not result["damaged"] and not result["unreadable"]
    assert not [path for path in root.iterdir() if path.name.startswith(".verify")]
    plain = run("--store", root)
    assert "9 blocks" in plain.stdout and "0 damaged" in plain.stdout
    assert "\x1b" not in plain.output and plain.stderr == ""
    assert all(len(line) <= 80 for line in plain.stdout.splitlines())


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: flip(path, 50), "checksum of tensor 0 of shard 0"),
        (lambda path: flip(path, 5010), "checksum of tensor 1 of shard 0"),
        (lambda path: flip(path, 8000), "checksum of tensor 1 of shard 0"),  # padding
        (lambda path: flip(path, 8192), "no block record"),
        (lambda path: flip(path, 8192 + 2000), "damaged record"),  # its unused bytes
        (lambda path: os.truncate(path, FILE - 1), f"{FILE - 1} bytes, not {FILE}"),
        (lambda path: os.truncate(path, 0), f"0 bytes, not {FILE}"),
        (lambda path: path.write_bytes(bytes(FILE)), "no block record"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "not a regular file"),
    ],
)
def test_damage_is_found_and_removed(options, damage, why):
    """Pinned: one bit anywhere; dry until --repair, and then the damaged block goes, alone."""
    root = stored(options, keys(5))
    bad, *good = blocks(root)
    damage(bad)
    status, result = found("--store", root)
    assert status == 1
    assert [each["path"] for each in result["damaged"]] == [str(bad)]
    assert why in result["damaged"][0]["problem"]
    assert os.path.lexists(bad)
    status, result = found("--store", root, "--repair", "--yes")
    assert status == 1 and result["removed"] == [str(bad)]
    assert blocks(root) == good
    assert found("--store", root)[0] == 0


def test_a_block_in_anothers_place_is_damage(options):
    """Pinned: a right block under another name, or in another identity, is not that block."""
    other = identity(model_identity="tests/other")
    root = stored(options, keys(2), identity(), other)
    mine = [path for path in blocks(root) if "llama" in path.parts[-4]]
    theirs = [path for path in blocks(root) if "other" in path.parts[-4]]
    mine[0].write_bytes(mine[1].read_bytes())
    theirs[0].write_bytes(mine[1].read_bytes())
    _, result = found("--store", root)
    problems = {each["path"]: each["problem"] for each in result["damaged"]}
    assert problems[str(mine[0])] == "another block"
    assert str(theirs[0]) in problems


def test_without_a_manifest_blocks_are_checked_by_what_they_say(options):
    """Pinned: a lost manifest is said, and damage is found all the same."""
    root = stored(options, keys(3))
    (path,) = root.glob("*/identity.json")
    path.unlink()
    assert found("--store", root)[0] == 0
    assert "no identity.json" in run("--store", root).stdout
    flip(blocks(root)[1])
    status, result = found("--store", root)
    assert status == 1 and len(result["damaged"]) == 1


def test_no_store_and_nobody_to_ask(tmp_path, options):
    """Pinned: both are errors, the second before anything is read."""
    done = run("--store", tmp_path / "none")
    assert done.exit_code == 3 and "none" in done.stderr
    root = stored(options, keys(2))
    flip(blocks(root)[0])
    done = run("--store", root, "--repair", input="y\n")
    assert done.exit_code == 3 and "--yes" in done.stderr
    assert len(blocks(root)) == 2


def test_someone_elses_store(options):
    """Pinned: what can't be listed isn't called right, nor damaged."""
    with open_place() as place:
        root = stored(options, keys(2), storage_backends=[str(place / "store")])
        done = as_nobody("verify", "--store", root, "--json")
        assert done.returncode == 3, done.stderr
        assert "error" in json.loads(done.stdout)
        root.chmod(0o755)
        done = as_nobody("verify", "--store", root, "--json")
        assert done.returncode == 3, done.stderr
        result = json.loads(done.stdout)
        assert result["blocks"] == 0
        assert [each["problem"] for each in result["not_checked"]] == ["Permission denied"]


def test_on_a_full_disk(options, tmp_path, monkeypatch):
    """Pinned: the state can't be kept, which is said once; damage is found and removed."""
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        root = stored(options, keys(20), storage_backends=[str(disk / "store")])
        fill(disk)
        flip_in_place(blocks(root)[3])
        monkeypatch.setattr("cachestore_connector.cli.verify._SAVE_SECONDS", 0)
        done = run("--store", root, "--repair", "--yes")
        assert done.exit_code == 1, done.output
        assert "1 removed" in done.stdout
        assert done.stderr.count("can't be resumed") == 1 and "No space" in done.stderr
        assert not [path for path in root.iterdir() if path.name.startswith(".verify")]
        assert len(blocks(root)) == 19


def flip_in_place(path):
    with open(path, "r+b") as file:
        file.write(b"another text")


def start(root, *words, **more):
    """`cachestore verify` as a process of its own."""
    code = "import sys; from cachestore_connector.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", code, "verify", "--store", str(root), *words]
    return subprocess.Popen(command, env=os.environ | {"COLUMNS": "80", "TERM": "xterm"}, **more)


def test_interrupted_and_resumed(options):
    """Pinned: Ctrl-C ends it at once with how far it got; --resume reads the rest, each block once.

    Damage that was found before is in the result, and repaired.
    """
    root = stored(options, keys(40))
    first, *_, last = blocks(root)
    flip(first)
    flip(last)
    # Ten blocks a second.
    slow = start(root, "--rate-limit", "0.12", "--threads", "1", stdout=subprocess.PIPE, text=True)
    state = root / ".verify-state"
    poll(state.exists, 20, "the state file", interval=0.01)
    slow.send_signal(signal.SIGINT)
    out, _ = slow.communicate(timeout=20)
    assert slow.returncode == 3
    assert "--resume" in out
    before = json.loads(state.read_text())
    assert 0 < before["blocks"] < 40 and len(before["damaged"]) == 1
    read = []
    from cachestore_connector import block_check

    check = block_check.Checker.check

    def noted(self, path, described):
        read.append(path)
        return check(self, path, described)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_check.Checker, "check", noted)
        status, result = found("--store", root, "--resume", "--repair", "--yes")
    assert sorted(read) == blocks_after(root, before["position"]["block"], read)
    assert status == 1 and result["blocks"] == 40
    assert result["removed"] == [str(first), str(last)]
    assert not state.exists()
    assert found("--store", root, "--resume")[1]["blocks"] == 38


def blocks_after(root, block, removed):
    every = {path for path in [*blocks(root), *removed] if path.name > block}
    return sorted(every)


def test_a_state_that_is_none_is_refused(options, tmp_path):
    """Pinned: nothing of it is trusted, and another store's isn't gone on with."""
    root = stored(options, keys(2))
    state = tmp_path / "state"
    for content in ("", "[]", "{}", '{"cachestore_verify": 2}', "[" * 100000):
        state.write_text(content)
        done = run("--store", root, "--resume", "--state", state)
        assert done.exit_code == 3 and "state" in done.stderr, content
    state.write_text(
        '{"cachestore_verify": 1, "scope": ["/elsewhere"], "position": null, "blocks": 0, '
        '"size": 0, "unknown": 0, "gone": 0, "damaged": [], "unreadable": []}'
    )
    done = run("--store", root, "--resume", "--state", state)
    assert done.exit_code == 3 and "/elsewhere" in done.stderr


def test_on_a_terminal(options):
    """Pinned: a bar with rate and time left; --repair asks, and no is no."""
    root = stored(options, keys(30))
    bad = blocks(root)[0]
    flip(bad)
    words = ("verify", "--store", root, "--rate-limit", "0.6", "--repair")
    for answer, left in ((b"n\n", 30), (b"y\n", 29)):
        status, said = on_a_terminal(*words, answer=answer)
        assert status == 1
        assert "/s" in said and "0:00:0" in said and "%" in said
        assert len(blocks(root)) == left


def test_beside_a_store_that_is_dumped_to_and_cleared(options):
    """Pinned: what comes and goes under the reader's eyes is never called damaged."""
    which = identity()
    root = stored(options, keys(1))
    store = Store(given(options, which))
    ended = threading.Event()

    def busy():
        number = 0
        while not ended.is_set():
            dump(store, which, keys(64), seed=number)
            if number % 3 == 2:
                store.clear()
            number += 1

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        seen = gone = 0
        for _ in range(12):
            status, result = found("--store", root, "--repair", "--yes", "--threads", "2")
            assert status == 0, result
            seen += result["blocks"]
            gone += result["gone"]
        assert seen > 0
    finally:
        ended.set()
        thread.join()
    assert dump(store, which, keys(64)) == [0] * 64
    assert store.lookup(which.block_ids(keys(64))) == [True] * 64
    store.close()
