"""identity.py: what tells caches apart, and the one derivation of block ids (F22 to F25)."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore_connector.errors import ConfigError
from cachestore_connector.identity import Identity, from_parts

MHA: dict[str, Any] = {
    "model_path": "/models/tiny-llama",
    "revision": "main",
    "served_model_name": "llama",
    "dtype": "bfloat16",
    "layout": "page_first_direct",
    "page_size": 64,
    "tensor_sizes": (65536, 65536),
    "is_mla": False,
    "tp_rank": 1,
    "tp_size": 4,
    "pp_rank": 0,
    "pp_size": 2,
}
MLA = MHA | {"is_mla": True, "tensor_sizes": (4497408,)}

# One changed part each; every one of them changes the bytes, or may. A name of `from_parts` that
# isn't here fails a test.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "namespace": [{"namespace": "tenant-a"}, {"namespace": "tenant-b"}],
    "model_path": [{"model_path": "/models/other"}],
    "revision": [{"revision": "v2"}, {"revision": None}],
    "served_model_name": [{"served_model_name": "other"}],
    "model_identity": [{"model_identity": "weights-1"}, {"model_identity": "weights-2"}],
    "storage_format_tag": [{"storage_format_tag": "unified-token-major"}],
    "dtype": [
        {"dtype": dtype}
        for dtype in (
            "float16", "float8_e4m3fn", "float8_e5m2", "fp8_e4m3 as uint8", "fp8_e5m2 as uint8",
            "fp8_e4m3 (float8_e4m3fnuz) as uint8", "auto as uint8", "nvfp4 as uint8",
            "mxfp8 as float8_e4m3fn",
        )
    ],
    "layout": [{"layout": "page_first"}, {"layout": "layer_first"}],
    "device_layout": [{"device_layout": "hnd"}, {"device_layout": "vectorized_5d"}],
    "page_size": [{"page_size": 32}],
    "tensor_sizes": [{"tensor_sizes": (65536, 65540)}, {"tensor_sizes": (65536,)}],
    "tp_size": [{"tp_size": 8}],
    "pp_rank": [{"pp_rank": 1}],
    "pp_size": [{"pp_size": 4}],
    "attn_cp_size": [{"attn_cp_size": 2}],
    "attn_cp_rank": [{"attn_cp_size": 2, "attn_cp_rank": 1}],
    "dcp_size": [{"dcp_size": 2}],
    "dcp_rank": [{"dcp_size": 2, "dcp_rank": 1}],
    "should_split_heads": [{"should_split_heads": True, "tp_lcm_size": 8}],
    "tp_lcm_size": [{"should_split_heads": True, "tp_lcm_size": 16}],
    "start_layer": [{"start_layer": 0}, {"start_layer": 4, "end_layer": 8}],
    "end_layer": [{"start_layer": 0, "end_layer": 4}, {"start_layer": 0, "end_layer": 8}],
    "variant": [
        {"variant": {name: value}}
        for name, value in (
            ("quantization", "fp8"), ("quantization", "awq"), ("quantization_param_path", "fp8"),
            ("quantization_param_path", "other"), ("weights", "fp8"),
        )
    ],
    "pool": [{"pool": "indexer"}],
    "family": [{"family": "0123456789abcdef" * 4}],
}  # fmt: skip
# Parts of one page: what differs between them leaves their block ids as they are.
OF_A_PART = {"tensor_sizes", "pp_rank", "start_layer", "end_layer", "pool"}
# Tested by themselves: they count for some models only.
DEPENDS = {"is_mla", "tp_rank", "tp_replicated", "cp_replicated"}


def test_every_part_has_a_change() -> None:
    """A part that is added to identities is added to the table."""
    assert set(CHANGES) | DEPENDS == set(inspect.signature(from_parts).parameters)
    ours = {field.name for field in dataclasses.fields(Identity)}
    assert set(CHANGES) | {"is_mla", "tp_rank", "format_version"} == ours


@pytest.mark.parametrize("base", [MHA, MLA], ids=["mha", "mla"])
def test_every_part_tells_caches_apart(base: dict[str, Any]) -> None:
    """F22: no two of these, and none and the base, share fingerprint or directory.

    Nor block ids, but for the parts of one page.
    """
    changes = [change for changes in CHANGES.values() for change in changes]
    identities = [from_parts(**base)] + [from_parts(**(base | change)) for change in changes]
    assert len({i.fingerprint for i in identities}) == len(identities)
    assert len({i.directory_name for i in identities}) == len(identities)
    parts = sum(len(CHANGES[name]) for name in OF_A_PART)
    # The rank of a group of two is such a part too, but of the group.
    assert len({i.block_id("key") for i in identities}) == len(identities) - parts - 2


@pytest.mark.parametrize("part", CHANGES)
def test_one_part_is_enough(part: str) -> None:
    """F22: a change of one alone tells caches apart, whatever the other values of it say."""
    base = from_parts(**MHA)
    for change in CHANGES[part]:
        other = from_parts(**(MHA | change))
        assert other.fingerprint != base.fingerprint
        assert other.directory_name != base.directory_name
        same = other.block_ids(("a", "b")) == base.block_ids(("a", "b"))
        assert same == (part in OF_A_PART)


def test_parts_of_a_page_have_one_id() -> None:
    """Ranks, stages and pools: the same family and block ids, in directories side by side.

    The directories have the same name up to the last dot.
    """
    cp = {"attn_cp_size": 2, "dcp_size": 2}
    kv = from_parts(**(MHA | cp))
    parts = [
        from_parts(**(MHA | cp | change))
        for change in (
            {"tp_rank": 2},
            {"pp_rank": 1, "tensor_sizes": (5, 6), "start_layer": 8, "end_layer": 16},
            {"attn_cp_rank": 1},
            {"dcp_rank": 1},
            {"pool": "indexer", "dtype": "uint8", "layout": "layer_first", "tensor_sizes": (7,),
             "page_size": 1, "family": kv.family},
        )
    ]  # fmt: skip
    assert {part.family for part in parts} == {kv.family}
    assert {part.block_id("key") for part in parts} == {kv.block_id("key")}
    assert len({part.fingerprint for part in [kv, *parts]}) == len(parts) + 1
    names = {part.directory_name for part in [kv, *parts]}
    assert len(names) == len(parts) + 1
    assert {name.rpartition(".")[0] for name in names} == {f"tiny-llama-{kv.family[:16]}"}


def test_golden_values() -> None:
    """The bytes of an identity are pinned: a change here loses every block already stored.

    If it is meant, raise FORMAT_VERSION and put the new values in.
    """
    identity = from_parts(**MHA)
    assert identity.canonical() == (
        b'{"attn_cp_rank":0,"attn_cp_size":1,"dcp_rank":0,"dcp_size":1,"dtype":"bfloat16",'
        b'"family":"fd45fbc8975160a2c3048bac3d8efc4d3f48b01887c5c85c15552d98f4cbc485",'
        b'"format_version":3,"is_mla":false,"layout":"page_first_direct",'
        b'"model_path":"/models/tiny-llama","page_size":64,"pool":"kv","pp_rank":0,"pp_size":2,'
        b'"revision":"main","served_model_name":"llama","should_split_heads":false,'
        b'"tensor_sizes":[65536,65536],"tp_rank":1,"tp_size":4}'
    )
    assert (
        identity.fingerprint.hex()
        == "c285e0f15e9a18007943b5bda506cb00511c41f2a889719ff088712a89defe93"
    )
    assert identity.block_id("a" * 64).hex() == "7fd9a6995888969d5500b8d1b2252fa1"
    assert identity.directory_name == "tiny-llama-fd45fbc8975160a2.kv-c285e0f15e9a1800"


def test_mha_and_mla_differ_in_the_tp_rank() -> None:
    """CONTRACT A.9: the TP rank is in an MHA identity and not in an MLA one."""
    mha = {from_parts(**(MHA | {"tp_rank": rank})).fingerprint for rank in range(4)}
    mla = {from_parts(**(MLA | {"tp_rank": rank})).fingerprint for rank in range(4)}
    assert len(mha) == 4
    assert len(mla) == 1
    assert "tp_rank" not in from_parts(**MLA).parts()
    for base in (MHA, MLA):  # of a side pool, which can be either beside either
        assert "tp_rank" not in from_parts(**base, tp_replicated=True).parts()
        assert from_parts(**base, tp_replicated=False).parts()["tp_rank"] == base["tp_rank"]


def test_dp_rank_is_in_no_identity() -> None:
    """Data-parallel replicas share pages: there is no field for their rank."""
    assert not [name for name in Identity.__dataclass_fields__ if re.search(r"(?<!c)dp_", name)]


def test_pipeline_stages_of_mla_never_share() -> None:
    """F23: dropping the TP rank of an MLA model must not drop the stage with it."""
    stages = {
        from_parts(**(MLA | {"pp_rank": stage, "tp_rank": rank})).fingerprint
        for stage in range(2)
        for rank in range(4)
    }
    assert len(stages) == 2


def test_context_parallel_rank_is_in_unless_known_to_be_replicated() -> None:
    """The CP rank holds its own bytes by default; replicated KV is one cache, its size is in."""
    own = {from_parts(**(MLA | {"attn_cp_rank": r, "attn_cp_size": 2})) for r in range(2)}
    assert len(own) == 2
    shared = {
        from_parts(**(MLA | {"attn_cp_rank": r, "attn_cp_size": 2, "cp_replicated": True}))
        for r in range(2)
    }
    assert len(shared) == 1
    assert shared.pop().parts()["attn_cp_size"] == 2


def test_model_identity_replaces_the_three_names() -> None:
    """The same weights under other paths and names share; all else still tells them apart."""
    here = from_parts(**(MHA | {"model_identity": "w"}))
    moved = MHA | {"model_path": "/mnt/x", "revision": "r", "served_model_name": "s"}
    assert from_parts(**(moved | {"model_identity": "w"})) == here
    nameless = MHA | {"model_path": None, "revision": None, "served_model_name": None}
    assert from_parts(**(nameless | {"model_identity": "w"})) == here
    assert not {"model_path", "revision", "served_model_name"} & set(here.parts())
    other = from_parts(**(MHA | {"model_identity": "w", "dtype": "float16"}))
    assert other.fingerprint != here.fingerprint
    tagged = from_parts(**(MHA | {"model_identity": "w", "storage_format_tag": "t"}))
    assert tagged.fingerprint != here.fingerprint


def test_a_served_name_alone_is_refused() -> None:
    """Two models can share a served name, so without a path the user must name the weights."""
    with pytest.raises(ConfigError, match="model_identity"):
        from_parts(**(MHA | {"model_path": ""}))


def test_what_does_not_apply_changes_nothing() -> None:
    """tp_lcm_size without head splitting, and empty strings for None, are the same identity."""
    base = from_parts(**(MHA | {"revision": None}))
    same = from_parts(
        **(MHA | {"revision": "", "storage_format_tag": "", "tp_lcm_size": 8, "variant": {}})
    )
    assert same == base
    assert same.fingerprint == base.fingerprint


def test_manifest_is_json_and_leaves_out_what_is_absent() -> None:
    """A field without a value isn't written, so adding one later keeps old fingerprints."""
    manifest = from_parts(**(MHA | {"revision": None})).parts()
    assert json.loads(json.dumps(manifest)) == manifest
    assert None not in manifest.values()
    assert not {"revision", "variant", "start_layer", "storage_format_tag"} & set(manifest)


@pytest.mark.parametrize(
    "bad",
    [
        {"dtype": ""},
        {"layout": None},
        {"pool": ""},
        {"page_size": 0},
        {"page_size": 64.0},
        {"page_size": True},
        {"tensor_sizes": ()},
        {"tensor_sizes": (65536, 0)},
        {"tp_rank": 4},
        {"tp_rank": -1},
        {"tp_size": 0},
        {"pp_rank": 2},
        {"attn_cp_rank": 1},
        {"dcp_rank": 1},
        {"should_split_heads": True},
        {"start_layer": -1},
        {"variant": {"a": 1}},
        {"family": "abc"},
        {"family": "A" * 64},
    ],
    ids=str,
)
def test_parts_that_cannot_be_true_are_refused(bad: dict[str, Any]) -> None:
    """A wrong rank or size is an error at once, not an identity nobody else will ever have."""
    with pytest.raises((ValueError, TypeError)):
        from_parts(**(MHA | bad))


names = st.text(max_size=8)
parts = st.fixed_dictionaries(
    {
        "model_path": st.text(min_size=1, max_size=8),
        "revision": names,
        "served_model_name": names,
        "storage_format_tag": names,
        "dtype": st.sampled_from(["bfloat16", "float16"]),
        "layout": st.sampled_from(["page_first", "layer_first"]),
        "page_size": st.integers(1, 3),
        "tensor_sizes": st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
        "is_mla": st.booleans(),
        "tp_rank": st.integers(0, 1),
        "tp_size": st.integers(2, 3),
        "variant": st.dictionaries(names, names, max_size=2),
    }
)


@given(parts, parts)
def test_fingerprints_are_equal_exactly_when_identities_are(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    """No two different identities run together in the canonical form, whatever is in the names."""
    a, b = from_parts(**left), from_parts(**right)
    assert (a == b) == (a.fingerprint == b.fingerprint) == (a.canonical() == b.canonical())


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_neighbouring_names_do_not_run_together(a: str, b: str, c: str, d: str) -> None:
    """("ab", "c") and ("a", "bc") as revision and served name are two identities."""
    left = from_parts(**(MHA | {"revision": a, "served_model_name": b}))
    right = from_parts(**(MHA | {"revision": c, "served_model_name": d}))
    assert ((a, b) == (c, d)) == (left.fingerprint == right.fingerprint)


def test_surrogates_are_not_the_character_they_encode() -> None:
    """Paths that aren't UTF-8 reach us with lone surrogates; they too are told apart."""
    pair = from_parts(**(MHA | {"model_path": "/m/\ud83d\ude00"}))
    char = from_parts(**(MHA | {"model_path": "/m/\U0001f600"}))
    assert pair.fingerprint != char.fingerprint
    assert pair.directory_name != char.directory_name


@given(st.lists(st.text(st.characters(), max_size=80), max_size=8))
def test_block_ids_are_the_block_id_of_each_key(keys: list[str]) -> None:
    """F24: the batch form and the single form agree, for any strings, in order, 16 bytes each."""
    identity = from_parts(**MHA)
    ids = identity.block_ids(keys)
    assert len(ids) == 16 * len(keys)
    assert [ids[16 * i : 16 * i + 16] for i in range(len(keys))] == [
        identity.block_id(key) for key in keys
    ]
    assert len({identity.block_id(key) for key in keys}) == len(set(keys))


def test_block_ids_take_odd_keys() -> None:
    """Empty, unicode, NUL and lone-surrogate keys have ids, all different."""
    keys = ["", "\0", "\0\0", "ключ", "\ud800", "\udc80", "a", "A"]
    ids = from_parts(**MHA).block_ids(keys)
    assert len({ids[i : i + 16] for i in range(0, len(ids), 16)}) == len(keys)


def test_block_id_is_keyed_blake2b_of_the_key() -> None:
    """The derivation can be redone from docs/format.md alone, without this package."""
    identity = from_parts(**MHA)
    redone = hashlib.blake2b(
        "ключ".encode(),
        digest_size=16,
        key=bytes.fromhex(identity.family),
        person=b"cachestore-block",
    )
    assert identity.block_id("ключ") == redone.digest()


def end_of_name(identity: Identity) -> str:
    """What follows model and namespace in the name of a KV pool's directory."""
    return f"{identity.family[:16]}.kv-{identity.fingerprint.hex()[:16]}"


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("/models/tiny-llama/", "tiny-llama-"),
        ("org/Model.v1_2", "Model.v1_2-"),
        ("/m/мой model", "____model-"),
        ("/m/..", "model-"),
        ("/m/.hidden", "hidden-"),
        ("/", "model-"),
        ("/m/" + "x" * 300, "x" * 40 + "-"),
    ],
)
def test_directory_name_is_safe_and_recognisable(name: str, start: str) -> None:
    """Basename first, safe characters only, bounded, never hidden, never a dot directory."""
    identity = from_parts(**(MHA | {"model_path": name}))
    assert identity.directory_name == start + end_of_name(identity)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,76}", identity.directory_name)
    named = from_parts(**(MHA | {"model_path": "/x", "model_identity": name}))
    assert named.directory_name.startswith(start)


def test_a_namespace_shows_in_the_directory_name() -> None:
    """People can tell tenants' directories apart; what isn't safe in a name is replaced."""
    for namespace, shown in (
        ("team-a", "team-a"), ("../x y", "_x_y"), ("п", "_"), ("." * 9, "namespace"),
        ("n" * 99, "n" * 20),
    ):  # fmt: skip
        identity = from_parts(**(MHA | {"namespace": namespace}))
        assert identity.directory_name == f"tiny-llama-{shown}-{end_of_name(identity)}"
        assert identity.parts()["namespace"] == namespace
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,98}", identity.directory_name)


def test_a_namespace_does_not_run_into_the_model() -> None:
    """Directory names that would read the same are told apart by the fingerprint."""
    left = from_parts(**(MHA | {"model_path": "/a-b"}))
    right = from_parts(**(MHA | {"model_path": "/a", "namespace": "b"}))
    assert left.directory_name[:4] == right.directory_name[:4] == "a-b-"
    assert left.directory_name != right.directory_name


def test_identity_is_frozen_and_copies_after_use() -> None:
    """Identities cross to other processes and threads, also after ids were derived."""
    identity = from_parts(**MHA)
    before = identity.block_id("k")
    with pytest.raises(AttributeError):
        identity.dtype = "float16"  # type: ignore[misc]
    for twin in (pickle.loads(pickle.dumps(identity)), copy.deepcopy(identity)):
        assert twin == identity
        assert twin.block_id("k") == before
