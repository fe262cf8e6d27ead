"""`cachestore ls`."""

import json

import pytest

from command_line import as_nobody, invoke
from disks import fill, small_disk
from stored_pages import FILE, identity, keys, open_place, stored


def run(*words):
    return invoke("ls", *words)


def test_pages_and_bytes_are_counted(options):
    """Pinned: each cache with its pages, bytes and last use; and as JSON."""
    root = stored(options, keys(5))
    done = run("--store", root, "--json")
    (each,) = json.loads(done.stdout)
    assert each["name"] == identity().directory_name
    assert (each["pages"], each["bytes"]) == (5, 5 * FILE)
    assert each["last_used"].startswith("20")
    plain = run("--store", root)
    assert plain.exit_code == 0
    assert each["name"].rpartition(".")[0][:10] in plain.stdout
    assert "\x1b" not in plain.stdout  # no colours in a pipe
    table = [line for line in plain.stdout.splitlines() if str(root) not in line]
    assert table and all(len(line) <= 80 for line in table)


def test_names_stay_whole(options):
    """Pinned: what `clear --identity` wants can be searched for and copied, however long it is."""
    models = ["tests/llama", "tests/" + "a-long-name-" * 5]
    which = [identity(model_identity=name, tp_rank=r, tp_size=2) for name in models for r in (0, 1)]
    lines = run("--store", stored(options, keys(2), *which)).stdout.splitlines()
    names = {each.directory_name.rpartition(".")[0] for each in which}
    assert len(names) == 2 and names < set(lines)
    # Each once, and below it a line for each rank.
    rows = [lines[lines.index(name) + 1 : lines.index(name) + 3] for name in names]
    for pair in rows:
        assert sorted(row.split()[3:5] for row in pair) == [["tp", "0/2"], ["tp", "1/2"]]
        assert all(row.split()[:3] == ["kv", "bfloat16", "page_first"] for row in pair)
    assert len(lines) == 1 + 2 + 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": "x"}'])
def test_damage(options, text):
    """Pinned: a manifest that can't be read is said, its pages are counted, others are listed."""
    damaged, other = identity(), identity(model_identity="tests/other")
    root = stored(options, keys(3), damaged, other)
    (root / damaged.directory_name / "identity.json").write_text(text)
    done = run("--store", root, "--json")
    assert done.exit_code == 1
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert found[damaged.directory_name]["pages"] == 3
    assert found[damaged.directory_name]["problem"]
    assert not found[other.directory_name]["problem"]
    plain = run("--store", root)
    assert plain.exit_code == 1 and found[damaged.directory_name]["problem"] in " ".join(
        plain.output.split()
    )


def test_on_a_full_disk(options, tmp_path):
    """Pinned: it writes nothing, so that it works."""
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        root = stored(options, keys(2), storage_backends=[str(disk / "store")])
        fill(disk)
        done = run("--store", root, "--json")
        assert done.exit_code == 0 and json.loads(done.stdout)[0]["pages"] == 2


def test_no_store_is_an_error(tmp_path):
    """Pinned: what isn't there is said, by its name."""
    done = run("--store", tmp_path / "none")
    assert done.exit_code == 3
    assert str(tmp_path / "none") in done.stderr
    assert json.loads(run("--store", tmp_path / "none", "--json").stdout)["error"]


def test_someone_elses_store(options):
    """Pinned: a cache that can't be read is said, and the others are listed."""
    with open_place() as place:
        readable, other = identity(), identity(model_identity="tests/other")
        store = str(place / "store")
        root = stored(options, keys(2), readable, other, storage_backends=[store])
        root.chmod(0o755)
        for path in (root / readable.directory_name).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (root / readable.directory_name).chmod(0o755)
        done = as_nobody("ls", "--store", root, "--json")
        assert done.returncode == 1, done.stderr
        found = {each["name"]: each for each in json.loads(done.stdout)}
        assert found[readable.directory_name]["pages"] == 2
        assert not found[readable.directory_name]["problem"]
        hidden = found[other.directory_name]
        assert hidden["pages"] == 0 and "Permission denied" in hidden["problem"]
