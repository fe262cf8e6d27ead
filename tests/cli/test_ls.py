"""`cachestore ls`."""

import json

import numpy as np

from command_line import as_nobody, invoke
from stored_pages import identity, keys, open_place
from stored_pages import stored as stored_pages


def run(*words):
    return invoke("ls", *words)


def stored(options, pages):
    """A store in which so many pages lie; its directory."""
    from cachestore_connector.store import Store
    from pages_of_bytes import Memory, block_ids

    given = options()
    store = Store(given)
    memory = Memory(pages, list(given.tensor_sizes), seed=1)
    store.dump(block_ids(pages), memory.addresses(), memory.lengths())
    store.close()
    return given.storage_backends[0]


def test_pages_and_bytes_are_counted(options):
    """Pinned: each cache with its pages, bytes and last use; and as JSON."""
    root = stored(options, 5)
    done = run("--store", root, "--json")
    (each,) = json.loads(done.stdout)
    assert each["pages"] == 5
    sizes = [path.stat().st_size for path in _files(root)]
    assert each["bytes"] == sum(sizes) and np.ptp(sizes) == 0
    assert each["last_used"].startswith("20")
    plain = run("--store", root)
    assert each["name"].rpartition(".")[0][:10] in plain.stdout
    assert "\x1b" not in plain.stdout  # no colours in a pipe
    table = [line for line in plain.stdout.splitlines() if root not in line]
    assert table and all(len(line) <= 80 for line in table)


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
        root = stored_pages(options, keys(2), readable, other, storage_backends=[store])
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


def _files(root):
    from pathlib import Path

    return [path for path in Path(root).glob("*/blocks/*/*") if path.is_file()]
