"""config.py: keys, types, messages, geometry, the shipped YAML (F32)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cachestore_connector.config import (
    CACHE_POSIX,
    SETTINGS,
    Config,
    check_geometry,
    choose_pipeline,
    load,
    reference_yaml,
)
from cachestore_connector.errors import ConfigError
from given_settings import ENV, refused

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = CONFIGS / "cachestore.yaml"


# --- defaults and the shipped file


def test_defaults() -> None:
    """The default of every setting, pinned: changing one is a visible decision."""
    assert dataclasses.asdict(load(None, ENV)) == {
        "store_pipeline": None,
        "storage_backends": ("/home/u/.cache/cachestore",),
        "posix_capacity_gb": None,
        "posix_free_space_reserve_gb": None,
        "posix_high_watermark_percent": 97,
        "posix_low_watermark_percent": 95,
        "verify": "always",
        "io_direct": False,
        "posix_zero_copy": "auto",
        "posix_load_worker_number": 8,
        "posix_dump_worker_number": 8,
        "posix_queue_depth": 1024,
        "timeout_ms": 30000,
        "cache_use_host_buffer": True,
        "share_buffer_enable": True,
        "cache_buffer_directory": "/dev/shm",
        "cache_buffer_capacity_gb": None,
        "cache_dirty_percent": 50,
        "cache_h2h_worker_number": 4,
        "cache_h2h_queue_depth": 1024,
        "cache_h2h_cpu_affinity": "auto",
        "cache_peer_timeout_ms": 5000,
        "cache_io_aggregation": False,
        "cache_sdma_direct": False,
        "use_gdr": False,
        "gpu_kv_buffer_addrs": None,
        "tensor_size_list": None,
        "shard_size": None,
        "block_size": None,
        "namespace": None,
        "model_identity": None,
    }
    assert load({}, ENV) == load(None, ENV)


def test_config_alone_is_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Config() and load() have the same defaults, the environment's part of them included."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("CACHESTORE_CONFIG", raising=False)
    assert Config() == load() == load(None, {"XDG_CACHE_HOME": "/xdg"})
    assert Config().storage_backends == ("/xdg/cachestore",)


def test_shipped_file_is_the_table_in_yaml() -> None:
    """configs/cachestore.yaml is what the table says, word for word."""
    assert SHIPPED.read_text(encoding="utf-8") == reference_yaml()


def test_shipped_file_gives_exactly_the_defaults() -> None:
    """Loaded either way, the shipped file changes nothing, and it lists every setting."""
    shipped = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    assert list(shipped) == list(SETTINGS)
    assert load(shipped, ENV) == load(None, ENV)
    assert load(None, ENV | {"CACHESTORE_CONFIG": str(SHIPPED)}) == load(None, ENV)
    assert load(shipped, ENV | {"CACHESTORE_CONFIG": str(SHIPPED)}) == load(None, ENV)


@pytest.mark.parametrize(
    ("name", "pipeline", "settings"),
    [
        ("mla", CACHE_POSIX, {"cache_h2h_worker_number", "cache_h2h_queue_depth", "use_gdr"}),
        ("posix", "Posix", {"io_direct", "posix_queue_depth", "timeout_ms"}),
    ],
)
def test_short_files_say_the_defaults(name: str, pipeline: str, settings: set[str]) -> None:
    """The files for one purpose force its pipeline and change nothing else; they are short."""
    text = (CONFIGS / f"cachestore-{name}.yaml").read_text(encoding="utf-8")
    given = yaml.safe_load(text)
    assert settings | {"store_pipeline"} <= set(given) <= set(SETTINGS)
    forced = load({"store_pipeline": pipeline}, ENV)
    assert load(given, ENV) == forced
    assert load(None, ENV | {"CACHESTORE_CONFIG": str(CONFIGS / f"cachestore-{name}.yaml")}) == (
        forced
    )
    assert choose_pipeline(load(given, ENV), is_mla=True)[0] == pipeline
    assert len(text.splitlines()) < 40


def test_every_shipped_file_is_checked() -> None:
    """A file that is added to configs/ is added to the tests above."""
    assert {path.name for path in CONFIGS.iterdir()} == {
        "cachestore.yaml",
        "cachestore-mla.yaml",
        "cachestore-posix.yaml",
    }


def test_every_setting_is_documented() -> None:
    """A row without a sentence, a range or a reason to change it doesn't get in."""
    for name, row in SETTINGS.items():
        for text in (row.metadata["doc"], row.metadata["when"]):
            assert text.endswith("."), name
        assert row.metadata["kind"].allowed(row.metadata["unit"])


def test_config_is_frozen() -> None:
    """A Config is shared by threads and can't be changed."""
    config = load(None, ENV)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout_ms = 5  # type: ignore[misc]
    assert hash(config) == hash(load(None, ENV))


def test_imports_neither_torch_nor_sglang_nor_native() -> None:
    """Settings can be read and checked on a machine that has nothing but PyYAML."""
    code = (
        "import sys; import cachestore_connector.config, cachestore_connector.identity;"
        "print([m for m in ('torch', 'sglang', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("posix_queue_dept", "posix_queue_depth"),
        ("TIMEOUT_MS", "timeout_ms"),
        ("io-direct", "io_direct"),
        ("storage_backend", "storage_backends"),
        ("prefetch_treshold", "prefetch_threshold"),
    ],
)
def test_unknown_key_gets_a_did_you_mean(key: str, meant: str) -> None:
    """A near miss names the key meant, the value, and every key that is allowed."""
    refused({key: 7}, f"{key} = 7", f"did you mean {meant}?", *SETTINGS)


def test_unknown_key_far_from_all_has_no_suggestion() -> None:
    """No suggestion is better than a silly one; null doesn't excuse an unknown key."""
    assert "did you mean" not in str(refused({"zzz": None}, "zzz = null", "no such setting"))


@pytest.mark.parametrize("key", [8, True, None, 1.5, ("a",)])
def test_keys_must_be_strings(key: Any) -> None:
    """YAML makes `8:`, `on:` and `null:` keys that aren't strings; the error says so."""
    refused({key: 1}, repr(key), "must be a string")


# --- types and ranges

INTS = {
    "posix_load_worker_number": (1, 256),
    "posix_dump_worker_number": (1, 256),
    "posix_queue_depth": (128, 1048576),
    "timeout_ms": (100, 3600000),
    "cache_h2h_worker_number": (1, 64),
    "cache_h2h_queue_depth": (128, 1048576),
    "cache_peer_timeout_ms": (10, 3600000),
    "cache_dirty_percent": (1, 87),
    "shard_size": (1, 2**63 - 1),
    "block_size": (1, 2**63 - 1),
}


@pytest.mark.parametrize("key", INTS)
def test_integer_ranges(key: str) -> None:
    """Both ends are in, one past either is out, and the message has both ends."""
    low, high = INTS[key]
    for value in (low, high):
        assert getattr(load({key: value}, ENV), key) == value
    for value in (low - 1, high + 1, -1, 10**30):
        refused({key: value}, f"{key} = {value}", str(low), str(high))


@pytest.mark.parametrize("key", INTS)
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, "not numbers"),
        ("200", "without quotes"),
        (200.0, "without a decimal point"),
        (200.5, "fraction"),
        (float("nan"), ""),
        (float("inf"), ""),
        ([200], ""),
        ({}, ""),
    ],
    ids=str,
)
def test_integers_are_strict(key: str, value: Any, hint: str) -> None:
    """F32: nothing is quietly turned into a number, and the hint says what to write."""
    refused({key: value}, key, hint, "an integer from")


@pytest.mark.parametrize("key", ["posix_queue_depth", "cache_h2h_queue_depth"])
def test_queue_depth_gives_the_reason_of_its_limit(key: str) -> None:
    """128 is not arbitrary, and the message says why."""
    refused({key: 127}, f"{key} = 127", "SGLang sends 128 pages in one call")


@pytest.mark.parametrize("key", ["share_buffer_enable", "io_direct"])
@pytest.mark.parametrize("value", [1, 0, "true", "yes", [], 0.0])
def test_booleans_are_strict(key: str, value: Any) -> None:
    """0, 1 and words are not booleans."""
    allowed = "true, false or required" if key == "io_direct" else "true or false"
    refused({key: value}, key, allowed)


def test_booleans_and_choices_pass() -> None:
    """Every allowed value is taken as it is."""
    assert load({"io_direct": True}, ENV).io_direct is True
    for word in ("auto", "always", "never"):
        assert load({"posix_zero_copy": word}, ENV).posix_zero_copy == word
    assert load({"model_identity": " Ω "}, ENV).model_identity == " Ω "


@pytest.mark.parametrize(
    ("value", "hint"),
    [("Auto", "did you mean auto?"), ("nevr", "did you mean never?"), (True, "string"), ("", "")],
)
def test_choices_are_exact(value: Any, hint: str) -> None:
    """Another spelling is refused with the word meant and all that are allowed."""
    refused({"posix_zero_copy": value}, "posix_zero_copy", "auto, always or never", hint)


@pytest.mark.parametrize("key", ["model_identity", "namespace"])
@pytest.mark.parametrize("value", ["", "  ", 5, True, ["a"]])
def test_names_are_non_empty_strings(key: str, value: Any) -> None:
    """An empty name would put every model, or tenant, into one cache."""
    refused({key: value}, key, "non-empty string")


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([], "empty"),
        ([4096, 0], "element 1 is 0"),
        ([4096, -1], "element 1"),
        ([4096, None], "element 1 is None"),
        ([True], "element 0"),
        (["4096"], "without quotes"),
        ([4096.0], "decimal point"),
        (4096, "as a list"),
        ("4096", "as a list"),
    ],
)
def test_tensor_size_list_is_strict(value: Any, part: str) -> None:
    """Every element is checked like any integer, and named by its place."""
    refused({"tensor_size_list": value}, "tensor_size_list", "positive integers", part)


def test_direct_construction_is_checked() -> None:
    """Config(...) can't hold what load() would refuse, nor a path in its raw form."""
    good = {"storage_backends": ("/a",)}
    assert Config(**good, timeout_ms=100, tensor_size_list=(1, 2)).tensor_size_list == (1, 2)
    for bad in (
        {"timeout_ms": 99},
        {"timeout_ms": None},
        {"io_direct": 1},
        {"tensor_size_list": [1]},
        {"storage_backends": ("/a/",)},
        {"storage_backends": ("a",)},
        {"storage_backends": "/a"},
        {"storage_backends": ()},
        {"storage_backends": ("/a", "/a")},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Config(**(good | bad))  # type: ignore[arg-type]


# --- anything

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


@given(
    st.dictionaries(
        st.one_of(
            st.sampled_from([*SETTINGS]),
            scalars.filter(lambda value: not isinstance(value, (list, dict))),
        ),
        scalars,
        max_size=4,
    )
)
def test_any_mapping_gives_a_config_or_a_config_error(extra: dict[Any, Any]) -> None:
    """F32: no KeyError, TypeError or other bare error comes out, and what comes out is valid."""
    try:
        config = load(extra, ENV)
    except ConfigError as error:
        assert "allowed is" in str(error)
    else:
        for key, value in extra.items():
            if value is not None and isinstance(value, (int, bool)):
                assert getattr(config, key) is value or getattr(config, key) == value


# --- geometry


def test_geometry_left_out_or_equal_is_accepted() -> None:
    """The connector fills geometry in; a user's equal value is no conflict."""
    check_geometry(load(None, ENV), [10, 20], 30, 30)
    extra = {"tensor_size_list": [10, 20], "shard_size": 30, "block_size": 30}
    check_geometry(load(extra, ENV), [10, 20], 30, 30)
    check_geometry(load(extra, ENV), (10, 20), 30, 30)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_size_list", [20, 10]),
        ("tensor_size_list", [30]),
        ("shard_size", 31),
        ("block_size", 29),
    ],
)
def test_geometry_that_differs_is_refused(key: str, value: Any) -> None:
    """The message has the user's value and the pool's."""
    actual = {"tensor_size_list": [10, 20], "shard_size": 30, "block_size": 30}
    with pytest.raises(ConfigError) as caught:
        check_geometry(load({key: value}, ENV), [10, 20], 30, 30)
    assert f"{key} = {value}" in str(caught.value)
    assert str(actual[key]) in str(caught.value)


def test_a_number_too_long_to_write():
    """Pinned (F32): a number of five thousand digits is refused as any other wrong one."""
    with pytest.raises(ConfigError, match=r"timeout_ms = a int too long to show"):
        load({"timeout_ms": 10**5000}, {"HOME": "/h"})
