"""Stores with identities as SGLang's have them, for tests of the command line."""

import contextlib
import os
import tempfile
from pathlib import Path

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


@contextlib.contextmanager
def open_place():
    """A directory that others can look into, as pytest's can't be."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield Path(place)
