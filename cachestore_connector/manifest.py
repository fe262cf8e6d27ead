"""The manifest: what a directory of blocks says about itself, for people and for tools.

``<storage backend>/<identity>/identity.json`` is one JSON object: the identity's parts by name, and
under ``store`` what belongs to the files. `describe` makes it, `Manifest.text` writes it, `read` is
the one way to read it, and takes nothing in it on trust.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import CacheStoreError
from .identity import FINGERPRINT_BYTES, Identity, canonical_json

# Of the meaning of what is below `store`. New names there don't raise it.
MANIFEST_VERSION = 1

# Of the record at the end of each block file (docs/format.md).
RECORD_VERSION = 2
RECORD_BYTES = 4096

MAX_BYTES = 1 << 20

_MAX_SIZE = 2**63 - 1
_STORE = "store"


class ManifestError(CacheStoreError, ValueError):
    """A manifest that can't be used. The message names the file and, if there is one, the field."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (str(self),)


def _restore(message: str) -> ManifestError:
    error = ManifestError.__new__(ManifestError, message)
    error.args = (message,)
    return error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one directory of blocks holds. Immutable.

    ``identity``: the parts of an `Identity` by name, JSON types, those of a later version too:
    ``model_path``, ``namespace``, ``dtype``, ``layout``, ``page_size`` (tokens), ``tensor_sizes``
    (bytes) and so on. ``fingerprint``: its 32 bytes. ``payload_bytes``: all
    tensors of a page. ``shard_bytes``: a shard in its file, with its padding. ``block_bytes``: a
    block file, with its record. ``record_version``: of that record. ``software``: what wrote this.
    """

    identity: Mapping[str, Any]
    fingerprint: bytes
    payload_bytes: int
    shard_bytes: int
    block_bytes: int
    record_version: int
    software: str

    @property
    def model(self) -> str:
        """The model's name, as its identity gives it: model_identity, else its path."""
        return self.identity.get("model_identity") or self.identity.get("model_path") or ""

    def text(self) -> str:
        """The file's text, sorted by name."""
        store = {
            "manifest_version": MANIFEST_VERSION,
            "record_version": self.record_version,
            "software": self.software,
            "fingerprint": self.fingerprint.hex(),
            "payload_bytes": self.payload_bytes,
            "shard_bytes": self.shard_bytes,
            "block_bytes": self.block_bytes,
        }
        return json.dumps({**self.identity, _STORE: store}, indent=2, sort_keys=True) + "\n"


def describe(identity: Identity) -> Manifest:
    """The manifest of the directory that this version of the store keeps for an identity."""
    payload = sum(identity.tensor_sizes)
    shard = -(-payload // RECORD_BYTES) * RECORD_BYTES
    return Manifest(
        identity=identity.parts(),
        fingerprint=identity.fingerprint,
        payload_bytes=payload,
        shard_bytes=shard,
        block_bytes=shard + RECORD_BYTES,
        record_version=RECORD_VERSION,
        software=f"cachestore {_own_version()}",
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version("cachestore")
    except importlib.metadata.PackageNotFoundError:  # not installed: a source tree
        return "unknown"


def read(content: str | bytes, name: str = "identity.json") -> Manifest:
    """The manifest that a file's content is. ``name``: of the file, for messages.

    Names that are not known are kept. Raises `ManifestError`, and nothing else, for content that
    is longer than `MAX_BYTES`, isn't such JSON, lacks a field, has one of a wrong type, or whose
    parts don't have the fingerprint that it gives.
    """
    fields = _object(content, name)
    store = _take(fields, _STORE, _is_object, "an object", name)
    version = _take(store, "manifest_version", _is_count, "a version", f"{name}: {_STORE}")
    if version != MANIFEST_VERSION:
        raise ManifestError(
            name, f"manifest_version is {version}, and this version reads {MANIFEST_VERSION} only"
        )
    identity = {key: value for key, value in fields.items() if key != _STORE}
    for key, (fits, what, required) in _IDENTITY_FIELDS.items():
        if required or key in identity:
            _take(identity, key, fits, what, name)
    values = {
        key: _take(store, key, fits, what, f"{name}: {_STORE}")
        for key, (fits, what) in _STORE_FIELDS.items()
    }
    fingerprint = bytes.fromhex(values.pop("fingerprint"))
    try:
        actual = hashlib.sha256(canonical_json(identity)).digest()
    except RecursionError:
        raise ManifestError(name, "it is nested too deep") from None
    if actual != fingerprint:
        raise ManifestError(
            name, "fingerprint is not that of the fields beside it: the file was edited or damaged"
        )
    return Manifest(identity=identity, fingerprint=fingerprint, **values)


def _object(content: str | bytes, name: str) -> dict[str, Any]:
    """The JSON object in the content, without what JSON leaves to readers: doubled names, NaN."""
    if len(content) > MAX_BYTES:
        raise ManifestError(name, f"it is longer than {MAX_BYTES} bytes")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        fields = json.loads(
            text,
            object_pairs_hook=_without_doubles,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except RecursionError:
        raise ManifestError(name, "it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ManifestError(name, f"it is not UTF-8: {error}") from None
    except ValueError as error:
        raise ManifestError(name, f"it can't be read: {error}") from None
    if not isinstance(fields, dict):
        raise ManifestError(name, "it is not a JSON object")
    return fields


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [key for key, _ in pairs]
        double = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"{_shown(double)} is given twice")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{_shown(text)} is not a number that can be kept")
    return number


def _take(
    fields: Mapping[str, Any], key: str, fits: Callable[[Any], bool], what: str, name: str
) -> Any:
    if key not in fields:
        raise ManifestError(name, f"{key} is missing")
    value = fields[key]
    if not fits(value):
        raise ManifestError(name, f"{key} is {_shown(value)}, not {what}")
    return value


def _shown(value: Any) -> str:
    """A value for a message: bounded, and printable whatever is in it."""
    text = ascii(value) if isinstance(value, (str, bool, float)) else ""
    if type(value) is int:
        text = str(value) if abs(value) <= _MAX_SIZE else "a number too large"
    if not text:
        text = "null" if value is None else f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:100] + "..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_size, value))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_fingerprint(value: Any) -> bool:
    return (
        isinstance(value, str)
        and len(value) == 2 * FINGERPRINT_BYTES
        and all(char in "0123456789abcdef" for char in value)
    )


_TEXT = (_is_text, "a text")
_SIZE = (_is_size, "a positive integer of at most 63 bits")
_COUNT = (_is_count, "an integer of at most 63 bits")

# What a part of an identity is, and whether every identity has it.
_IDENTITY_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str, bool]] = {
    **dict.fromkeys(
        (
            "namespace",
            "model_path",
            "revision",
            "served_model_name",
            "model_identity",
            "storage_format_tag",
            "device_layout",
        ),
        (*_TEXT, False),
    ),
    **dict.fromkeys(("dtype", "layout", "pool"), (*_TEXT, True)),
    **dict.fromkeys(("page_size", "format_version", "tp_size", "pp_size"), (*_SIZE, True)),
    **dict.fromkeys(("attn_cp_size", "dcp_size"), (*_SIZE, True)),
    **dict.fromkeys(("pp_rank", "dcp_rank"), (*_COUNT, True)),
    **dict.fromkeys(("tp_rank", "attn_cp_rank", "start_layer", "end_layer"), (*_COUNT, False)),
    "tp_lcm_size": (*_SIZE, False),
    **dict.fromkeys(("is_mla", "should_split_heads"), (_is_bool, "true or false", True)),
    "family": (_is_fingerprint, "64 hex digits", False),
    "tensor_sizes": (_is_sizes, "a list of positive integers", True),
    "variant": (_is_texts, "an object of texts", False),
}

_STORE_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "record_version": _SIZE,
    "software": _TEXT,
    "fingerprint": (_is_fingerprint, "64 hex digits"),
    "payload_bytes": _SIZE,
    "shard_bytes": _SIZE,
    "block_bytes": _SIZE,
}
