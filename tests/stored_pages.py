"""Stores with identities as SGLang's have them, for tests of the command line."""

import contextlib
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cachestore_connector import manifest
from cachestore_connector.identity import from_parts
from cachestore_connector.store import Store
from pages_of_bytes import Memory

SIZES = [5000, 37]
FILE = 8192 + 4096  # bytes of a block file


def identity(**changes):
    """Of a small model's KV pool, on rank 0 of 1."""
    parts = {
        "model_identity": "tests/llama",
        "dtype": "bfloat16",
        "layout": "page_first",
        "page_size": 64,
        "tensor_sizes": SIZES,
        "is_mla": False,
    }
    return from_parts(**parts | changes)


def given(options, which, **changes):
    """StoreOptions of an identity."""
    size = sum(which.tensor_sizes)
    return options(
        identity_name=which.directory_name,
        identity_manifest=manifest.describe(which).text(),
        identity_fingerprint=which.fingerprint,
        tensor_sizes=list(which.tensor_sizes),
        shard_size=size,
        block_size=size,
        **changes,
    )


def keys(count, start=0):
    """Page keys as SGLang makes them."""
    return [f"{i:064x}" for i in range(start, start + count)]


def dump(store, which, names, seed=1):
    """Store pages; codes."""
    memory = Memory(len(names), which.tensor_sizes, seed=seed)
    return store.dump(which.block_ids(names), memory.addresses(), memory.lengths())


def stored(options, names, *identities, **changes):
    """The directory of a store in which each identity has these pages."""
    for which in identities or (identity(),):
        store = Store(given(options, which, **changes))
        assert dump(store, which, names) == [0] * len(names)
        store.close()
    return Path(given(options, which, **changes).storage_backends[0])


def blocks(root):
    """The block files, sorted by block id."""
    return sorted(Path(root).glob("*/blocks/*/*"), key=lambda path: path.name)


def flip(path, at=50):
    """Change one bit of a file, in place."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def as_nobody(*words):
    """`cachestore` with these words as another user, who can read the package's files."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    script = f"""
import os
import concurrent.futures.thread  # imported late otherwise, by who may not
from cachestore_connector.cli import main
import cachestore_connector.cli.du, cachestore_connector.cli.ls, cachestore_connector.cli.show
import cachestore_connector.cli.verify, cachestore_connector.cli.gc, cachestore_connector.cli.clear
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
main({[str(word) for word in words]!r})
"""
    return subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)


@contextlib.contextmanager
def open_place():
    """A directory that others can look into, as pytest's can't be."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield Path(place)


@contextlib.contextmanager
def small_disk(path, *options):
    """A tmpfs for the length of a ``with``; skips the test where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("not root: a file system can't be mounted")
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting isn't permitted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def on_a_terminal(*words, answer=b""):
    """`cachestore` with these words in a terminal of 80 columns: (exit status, what it printed).

    ``answer`` is typed when it asks.
    """
    code = "import sys; from cachestore_connector.cli import main; main(sys.argv[1:])"
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    said, answered = b"", False
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(mine, 4096):
            said += part
            if not answered and b"[y/N]" in said:
                os.write(mine, answer)
                answered = True
    os.close(mine)
    return process.wait(20), said.decode()
