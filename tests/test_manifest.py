"""manifest.py: what a directory says about itself, and that reading it trusts nothing."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore_connector import manifest
from cachestore_connector.errors import Code
from cachestore_connector.identity import from_parts
from cachestore_connector.manifest import MAX_BYTES, Manifest, ManifestError, describe, read
from pages_of_bytes import Memory, block_ids

CORPUS = Path(__file__).parent / "corpus" / "manifest"

# What is said of each file of the corpus that isn't a good one.
REFUSED = {
    "array-for-text": "dtype is a list, not a text",
    "array": "not a JSON object",
    "bad-utf8": "not UTF-8",
    "bool-for-number": "page_size is True, not a positive integer",
    "byte-order-mark": "can't be read",
    "deep-arrays": "nested too deep",
    "deep-closed": "fingerprint is not that",
    "deep-objects": "nested too deep",
    "deep-value": "nested too deep",
    "double-name": "'dtype' is given twice",
    "double-store": "'store' is given twice",
    "edited-dtype": "fingerprint is not that",
    "edited-unknown-field": "fingerprint is not that",
    "empty-tensor-sizes": "tensor_sizes is a list, not a list of positive integers",
    "empty-text": "dtype is '', not a text",
    "empty": "can't be read",
    "fingerprint-not-hex": "store: fingerprint is 'ggg",
    "fingerprint-of-another": "fingerprint is not that",
    "fingerprint-short": "fingerprint is 'ab', not 64 hex digits",
    "fingerprint-unicode-digits": "not 64 hex digits",
    "first-version": "store is missing",
    "fraction": "page_size is 64.0, not",
    "huge-exponent": "'1e400' is not a number",
    "huge-number": "can't be read",
    "manifest-version-2": "manifest_version is 2, and this version reads 1 only",
    "nan": "'NaN' is not a number",
    "negative-number": "page_size is -64, not",
    "nested-tensor-sizes": "tensor_sizes is a list, not",
    "no-block-bytes": "store: block_bytes is missing",
    "no-dtype": "dtype is missing",
    "no-store": "store is missing",
    "no-tensor-sizes": "tensor_sizes is missing",
    "null-for-text": "dtype is null, not a text",
    "null": "not a JSON object",
    "number-of-64-bits": "page_size is a number too large, not",
    "record-version-0": "record_version is 0, not",
    "store-is-empty": "store: manifest_version is missing",
    "store-is-text": "store is 'x', not an object",
    "text-for-number": "page_size is '64', not",
    "text": "not a JSON object",
    "truncated-last-byte": "can't be read",
    "truncated": "can't be read",
    "two-objects": "can't be read",
    "utf-16": "not UTF-8",
    "variant-is-array": "variant is a list, not an object of texts",
    "variant-of-numbers": "variant is a dict, not an object of texts",
    "zero-number": "page_size is 0, not",
    "zero-tensor": "tensor_sizes is a list, not",
    "zeros": "can't be read",
}

GOOD = (CORPUS / "good.json").read_bytes()

IDENTITY = from_parts(
    model_path="/models/tiny-llama", namespace="team-a", dtype="bfloat16",
    layout="page_first_direct", page_size=64, tensor_sizes=(100, 37), is_mla=False,
    variant={"quantization": "fp8"},
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in CORPUS.iterdir()))
def test_the_corpus(name: str) -> None:
    """Every file of it is read, or refused with a reason that names file and field."""
    content = (CORPUS / f"{name}.json").read_bytes()
    if name.startswith("good"):
        found = read(content)
        assert read(found.text()) == found
        return
    with pytest.raises(ManifestError) as caught:
        read(content, f"/d/{name}.json")
    assert str(caught.value).startswith(f"/d/{name}.json: ")
    assert REFUSED[name] in str(caught.value)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_the_corpus_has_every_case() -> None:
    """A reason without a file tests nothing."""
    assert set(REFUSED) <= {path.stem for path in CORPUS.iterdir()}


def test_what_is_written_is_read_again() -> None:
    """Model, type, layout, sizes, namespace and versions, and the fingerprint of the blocks."""
    found = read(describe(IDENTITY).text().encode())
    assert found == describe(IDENTITY)
    assert found.identity == IDENTITY.parts()
    assert found.fingerprint == IDENTITY.fingerprint
    assert found.model == "/models/tiny-llama"
    assert (found.payload_bytes, found.shard_bytes, found.block_bytes) == (137, 4096, 8192)
    assert found.software.startswith("cachestore 0.")
    named = from_parts(
        model_identity="w", dtype="d", layout="l", page_size=1, tensor_sizes=(1,), is_mla=True
    )
    assert read(describe(named).text()).model == "w"


def test_it_is_for_people_too() -> None:
    """One name a line, sorted; ASCII, so that nothing in a path can confuse a terminal."""
    identity = from_parts(
        model_path="/m/\udc80\x1b[31m", dtype="d", layout="l", page_size=1, tensor_sizes=(1,),
        is_mla=True,
    )  # fmt: skip
    text = describe(identity).text()
    assert text.isascii() and text.replace("\n", "").isprintable() and text.endswith("}\n")
    names = [line.split('"')[1] for line in text.splitlines() if line.startswith('  "')]
    assert names == sorted(names) and "model_path" in names
    assert read(text).identity == identity.parts()


def test_sizes_and_versions_are_those_of_the_files(options: Any) -> None:
    """The manifest's figures, compared with a block file that the store wrote (docs/format.md)."""
    from cachestore_connector.store import Store

    said = describe(IDENTITY)
    with_text = options(
        identity_manifest=said.text(), identity_name=IDENTITY.directory_name,
        identity_fingerprint=IDENTITY.fingerprint,
    )  # fmt: skip
    store = Store(with_text)
    memory, ids = Memory(1, [100, 37], seed=1), block_ids(1)
    assert store.dump(ids, memory.addresses(), memory.lengths()) == [Code.OK]
    store.close()
    base = Path(with_text.storage_backends[0]) / IDENTITY.directory_name
    assert read((base / "identity.json").read_bytes()) == said
    (block,) = base.glob("blocks/*/*")
    content = block.read_bytes()
    assert len(content) == said.block_bytes
    record = content[said.shard_bytes :]
    assert record[:8] == b"CSBLOCK1"
    assert int.from_bytes(record[8:12], "little") == said.record_version
    assert int.from_bytes(record[12:16], "little") == manifest.RECORD_BYTES
    assert record[16:48] == said.fingerprint


def test_too_long_is_refused_unread() -> None:
    """The bound is on what is given, before anything is made of it."""
    padded = GOOD + b" " * (MAX_BYTES - len(GOOD))
    assert read(padded) == read(GOOD)
    for content in (padded + b" ", b"[" * (MAX_BYTES + 1)):
        with pytest.raises(ManifestError, match="longer than 1048576 bytes"):
            read(content)


def test_an_error_crosses_to_another_process() -> None:
    """As every error of this package does."""
    error = ManifestError("a.json", "dtype is missing")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is ManifestError and str(twin) == "a.json: dtype is missing"


# --- anything


def read_or_refused(content: bytes | str) -> Manifest | None:
    """What reading gives: a manifest that holds its own promises, or None for a ManifestError."""
    try:
        found = read(content)
    except ManifestError as error:
        assert str(error).startswith("identity.json: ")
        return None
    for size in (found.payload_bytes, found.shard_bytes, found.block_bytes):
        assert type(size) is int and 0 < size < 2**63
    assert found.identity["tensor_sizes"] and found.identity["dtype"]
    assert read(found.text()) == found
    return found


seeds = st.sampled_from(sorted(CORPUS.iterdir())).map(Path.read_bytes)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.binary(max_size=300) | st.text(max_size=300))
def test_any_bytes(content: bytes | str) -> None:
    """Nothing but a ManifestError comes out, whatever is read."""
    assert read_or_refused(content) is None


@settings(max_examples=300, deadline=None)
@given(seeds, st.data())
def test_a_damaged_manifest(content: bytes, data: st.DataObject) -> None:
    """Bytes changed, cut, doubled or put in: refused, or read as what it was before.

    A change that the JSON doesn't show, such as another blank, is none.
    """
    before = read_or_refused(content)
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    kind = data.draw(st.sampled_from(["set", "cut", "insert", "repeat"]))
    if kind == "set":
        content = content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :]
    elif kind == "cut":
        content = content[:at] + content[at + data.draw(st.integers(1, 50)) :]
    elif kind == "insert":
        content = content[:at] + data.draw(st.binary(max_size=20)) + content[at:]
    else:
        content = content[:at] + content[max(0, at - 40) :]
    after = read_or_refused(content)
    if after is not None and before is not None:
        assert after.identity == before.identity and after.fingerprint == before.fingerprint


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*json.loads(GOOD), "another"]), json_values, st.booleans())
def test_any_value_in_any_field(field: str, value: Any, below: bool) -> None:
    """Of the identity and of the store; a field's wrong type never gets to who reads it."""
    fields = json.loads(GOOD)
    where = fields["store"] if below else fields
    keys = sorted(where)
    key = field if field in where else keys[len(field) % len(keys)]
    where[key] = value
    read_or_refused(json.dumps(fields))
