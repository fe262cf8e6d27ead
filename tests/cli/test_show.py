"""`cachestore show`."""

import json

import pytest
from crc32c import crc32c

from backends import flip
from cachestore_connector.store import Store
from command_line import as_nobody, invoke
from disks import fill, small_disk
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


def run(*words):
    return invoke("show", *words)


def shown(*words):
    done = run(*words, "--json")
    return done.exit_code, json.loads(done.stdout)["parts"]


@pytest.fixture
def page(options):
    """A page key of a model with two ranks and a side pool, one part of which is missing."""
    ranks = [identity(tp_rank=rank, tp_size=2) for rank in range(2)]
    side = identity(tp_rank=0, tp_size=2, pool="indexer", family=ranks[0].family, tensor_sizes=[64])
    lacking = identity(
        tp_rank=1, tp_size=2, pool="indexer", family=ranks[0].family, tensor_sizes=[64]
    )
    other = identity(model_identity="tests/other")
    root = stored(options, keys(3), *ranks, side, other)
    stored(options, keys(1, start=7), lacking)
    return root, keys(3)[1], ranks[0].block_id(keys(3)[1]).hex()


def test_all_parts_by_key_by_id_and_by_path(page):
    """Pinned: the same parts of all pools and ranks, whichever way it is asked; what lacks too."""
    root, key, block_id = page
    status, parts = shown(key, "--store", root)
    assert status == 0  # a part may be missing, as where a pool has windows
    by = {(part["pool"], part["ranks"]["tp"]): part for part in parts if part["ranks"]}
    assert set(by) == {("kv", "0/2"), ("kv", "1/2"), ("indexer", "0/2"), ("indexer", "1/2")}
    assert by["indexer", "1/2"]["state"] == "absent"
    mine = [part for part in parts if part["ranks"]]
    assert {part["block_id"] for part in mine} == {block_id}
    assert [part["state"] for part in mine].count("right") == 3
    assert by["kv", "0/2"]["bytes"] == FILE
    # The same key is a page of another model, too.
    assert len(parts) == 5
    path = by["kv", "1/2"]["path"]
    for words in ((block_id, "--store", root), (block_id.upper(), "--store", root), (path,)):
        status, found = shown(*words)
        assert found == mine, words
    plain = run(key, "--store", root).stdout
    assert "indexer" in plain and "absent" in plain and "written in this boot" in plain
    assert "\x1b" not in plain
    table = [line for line in plain.splitlines() if not line.startswith(("/", "    "))]
    assert len(table) == 9 and all(len(line) <= 80 for line in table)


def test_what_the_record_says(options):
    """Pinned: its fields, and each tensor's checksum."""
    root = stored(options, keys(1))
    status, (part,) = shown(keys(1)[0], "--store", root)
    assert status == 0
    record, content = part["record"], blocks(root)[0].read_bytes()
    assert (record["version"], record["payload"], record["stride"]) == (2, 5037, 8192)
    assert record["this_boot"] is True
    assert [each["crc32c"] for each in record["tensors"]] == [
        f"{crc32c(content[:5000]):08x}",
        f"{crc32c(content[5000:8192]):08x}",
    ]
    assert [each["right"] for each in record["tensors"]] == [True, True]
    assert part["last_used"].startswith("20")


def test_damage(page):
    """Pinned: which part, and which of its tensors."""
    root, key, block_id = page
    path = next(p for p in blocks(root) if p.name == block_id and "kv" in p.parts[-4])
    flip(path, 5001)
    status, parts = shown(key, "--store", root)
    (bad,) = [part for part in parts if part["state"] == "damaged"]
    assert status == 1 and bad["path"] == str(path)
    assert [each["right"] for each in bad["record"]["tensors"]] == [True, False]
    flip(path, FILE - 100)
    (bad,) = [part for part in shown(key, "--store", root)[1] if part["state"] == "damaged"]
    assert bad["record"] is None and bad["problem"] == "damaged record"
    assert "damaged record" in run(key, "--store", root).stdout


def test_in_one_of_several_directories(options, tmp_path):
    """Pinned: a block that lies in one of them isn't absent from the others."""
    which, names = identity(), keys(8)
    roots = [str(tmp_path / name) for name in "ab"]
    store = Store(given(options, which, storage_backends=roots))
    dump(store, which, names)
    seen = set()
    for name in names:
        status, parts = shown(name, "--store", roots[0], "--store", roots[1])
        (part,) = parts
        assert status == 0 and part["state"] == "right"
        seen.add(part["root"])
    assert seen == set(roots)
    store.close()


def test_nothing_and_nonsense(options, tmp_path):
    """Pinned: an unknown page is status 1, what is no key 2, no store 3."""
    root = stored(options, keys(1))
    assert shown(keys(1, start=5)[0], "--store", root) == (1, [])
    assert "nothing" in run("ab" * 16, "--store", root).stdout
    for word in ("abc", "xyz" * 10, "/etc/passwd", str(root)):
        assert run(word, "--store", root).exit_code == 2, word
    assert run(keys(1)[0], "--store", tmp_path / "none").exit_code == 3


def test_someone_elses_store(options):
    """Pinned: it isn't said that nothing is there of what can't be looked at."""
    with open_place() as place:
        root = stored(options, keys(1), storage_backends=[str(place / "store")])
        assert as_nobody("show", keys(1)[0], "--store", root).returncode == 3
        root.chmod(0o755)
        done = as_nobody("show", keys(1)[0], "--store", root)
        assert done.returncode == 1, done.stderr
        assert "not looked at" in done.stdout and "Permission denied" in done.stdout
        done = as_nobody("show", blocks(root)[0].name, "--store", root, "--json")
        (part,) = json.loads(done.stdout)["parts"]
        assert done.returncode == 1 and part["state"] == "unreadable"


def test_on_a_full_disk(options, tmp_path):
    """Pinned: it writes nothing, so that it works."""
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        root = stored(options, keys(1), storage_backends=[str(disk / "store")])
        fill(disk)
        assert shown(keys(1)[0], "--store", root)[0] == 0
