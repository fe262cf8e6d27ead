"""config.py and opening.py: space, verification, O_DIRECT (contract A; F10, F32)."""

from __future__ import annotations

from typing import Any

import pytest

from cachestore_connector.config import CACHE_POSIX, load
from cachestore_connector.errors import ConfigError, StoreInvalidArgument
from cachestore_connector.identity import from_parts
from cachestore_connector.opening import capacities, open_store, shard_size, space
from given_settings import ENV, refused

GIB = 2**30
TWO = {"storage_backends": ["/a", "/b"]}

PERCENTS = ("posix_high_watermark_percent", "posix_low_watermark_percent")


def test_io_direct_has_three_values() -> None:
    """`required` is one more than true; it is a word, and is told from a quoted boolean."""
    for value in (True, False, "required"):
        assert load({"io_direct": value}, ENV).io_direct is value
    refused({"io_direct": "Required"}, "did you mean required?", "true, false or required")
    refused({"io_direct": "true"}, "without quotes")


def test_verify_has_three_values() -> None:
    """Each is taken as it is; anything else is refused with the word meant."""
    for value in ("always", "sample", "never"):
        assert load({"verify": value}, ENV).verify == value
    refused({"verify": "sampled"}, "verify", "always, sample or never", "did you mean sample?")
    refused({"verify": False}, "verify", "string")


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (0, "above 0"),
        (-1, "above 0"),
        (2**31, "up to 1073741824"),
        (float("inf"), "above 0"),
        (float("nan"), "above 0"),
        ("100", "without quotes"),
        (True, "not numbers"),
        ({}, "above 0"),
        ([], "empty"),
        ([100, 0], "element 1 is 0"),
        ([100, "1"], "element 1 is '1', it is a string"),
        ([100, None], "element 1 is None"),
        ([100, [1]], "element 1"),
    ],
    ids=str,
)
def test_a_capacity_is_strict(value: Any, part: str) -> None:
    """F32: a wrong number is refused, alone or in a list; the message says what is allowed."""
    refused(TWO | {"posix_capacity_gb": value}, "posix_capacity_gb", "a list of one for each", part)


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_the_wrong_length_names_both_settings(count: int) -> None:
    """One number for each directory: which is which must not be guessed."""
    refused(
        TWO | {"posix_capacity_gb": [5] * count},
        f"posix_capacity_gb = {[5] * count}", "a list of 2", "storage_backends", f"has {count}",
    )  # fmt: skip


def test_a_number_is_split_evenly_and_a_list_is_not() -> None:
    """GiB are 2**30 bytes; a number is for all directories together; null is no limit."""
    assert capacities(load(TWO, ENV)) is None
    assert capacities(load(TWO | {"posix_capacity_gb": 3}, ENV)) == (3 * GIB // 2,) * 2
    assert capacities(load(TWO | {"posix_capacity_gb": 0.5}, ENV)) == (GIB // 4,) * 2
    assert capacities(load(TWO | {"posix_capacity_gb": [1, 2.5]}, ENV)) == (GIB, 5 * GIB // 2)
    assert load(TWO | {"posix_capacity_gb": [1, 2.5]}, ENV).posix_capacity_gb == (1, 2.5)
    assert capacities(load(TWO | {"posix_capacity_gb": 1e-12}, ENV)) == (1, 1)


@pytest.mark.parametrize("value", [-1, "1", True, [1], 2**31, float("nan")], ids=str)
def test_a_reserve_is_strict(value: Any) -> None:
    """From zero, which is none; a list is refused."""
    refused({"posix_free_space_reserve_gb": value}, "posix_free_space_reserve_gb", "from 0 up to")


def test_a_reserve_may_be_zero() -> None:
    """Zero and null both reserve nothing."""
    assert load({"posix_free_space_reserve_gb": 0}, ENV).posix_free_space_reserve_gb == 0
    assert load({"posix_free_space_reserve_gb": 2.5}, ENV).posix_free_space_reserve_gb == 2.5


@pytest.mark.parametrize("key", PERCENTS)
def test_watermarks_are_percents(key: str) -> None:
    """Both ends are in, one past either is out."""
    other = dict(zip(PERCENTS, (100, 1), strict=True))
    for value in (1, 100):
        extra = other | {key: value}
        assert getattr(load(extra, ENV), key) == value
    for value in (0, 101, 50.0, "50"):
        refused(other | {key: value}, f"{key} = {value!r}", "from 1 to 100")


def test_the_low_watermark_is_not_above_the_high_one() -> None:
    """The message names both, also where one of them is the default; equal is allowed."""
    low, high = "posix_low_watermark_percent", "posix_high_watermark_percent"
    refused({low: 91, high: 90}, f"{low} = 91", f"{high}, which is 90")
    refused({high: 90}, f"{low} = 95", f"{high}, which is 90")
    refused({low: 98}, f"{low} = 98", f"{high}, which is 97")
    assert load({low: 90, high: 90}, ENV).posix_low_watermark_percent == 90


@pytest.mark.parametrize("io_direct", [True, "required"])
def test_o_direct_aligns_the_shard(io_direct: Any) -> None:
    """Contract A: a shard is a multiple of 4096 bytes with O_DIRECT, wanted or required."""
    config = load({"io_direct": io_direct}, ENV)
    assert [shard_size(config, "Posix", size) for size in (1, 4096, 4097, 116992)] == [
        4096, 4096, 8192, 118784,
    ]  # fmt: skip
    assert shard_size(load(None, ENV), "Posix", 4097) == 4097
    assert shard_size(load(None, ENV), CACHE_POSIX, 4097) == 8192


def test_the_log_says_what_space_there_is() -> None:
    """Capacity and reserve with their units; without either, that nothing is evicted."""
    said = space(load(TWO | {"posix_capacity_gb": 100, "posix_free_space_reserve_gb": 7.5}, ENV))
    assert said == (
        "room for 100 GiB of blocks (in all; eviction from 97 % down to 95 %), 7.5 GiB kept free"
    )
    assert "100, 50.5 GiB of blocks (each;" in space(
        load(TWO | {"posix_capacity_gb": [100, 50.5]}, ENV)
    )
    for none in ({}, {"posix_free_space_reserve_gb": 0}):
        assert space(load(none, ENV)).startswith("nothing is evicted: neither posix_capacity_gb")


IDENTITY = from_parts(
    model_path="/m", dtype="bfloat16", layout="page_first", page_size=64,
    tensor_sizes=(100, 37), is_mla=False,
)  # fmt: skip


def opened_with(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]) -> Any:
    """The StoreOptions that open_store makes of settings."""
    from cachestore_connector import opening

    seen: list[Any] = []
    monkeypatch.setattr(opening, "Store", seen.append)
    open_store(load(TWO | extra, ENV), "Posix", IDENTITY, (100, 37))
    (options,) = seen
    return options


def test_settings_reach_the_native_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its unit: bytes, percents, words."""
    options = opened_with(
        monkeypatch,
        {
            "verify": "sample", "io_direct": "required", "posix_capacity_gb": [1, 2],
            "posix_free_space_reserve_gb": 0.25, "posix_high_watermark_percent": 80,
            "posix_low_watermark_percent": 70,
        },
    )  # fmt: skip
    assert (options.verify, options.io_direct) == ("sample", "required")
    assert options.posix_capacities == (GIB, 2 * GIB)
    assert options.posix_free_space_reserve == GIB // 4
    assert (options.posix_high_watermark_percent, options.posix_low_watermark_percent) == (80, 70)
    assert options.shard_size == 4096
    options = opened_with(monkeypatch, {})
    assert options.posix_capacities is None
    assert (options.posix_free_space_reserve, options.verify) == (0, "always")


@pytest.mark.parametrize(
    ("extra", "text", "parts"),
    [
        (
            {"posix_capacity_gb": [1, 2]},
            "posix_capacities[0] is 1, smaller than a block",
            ("posix_capacity_gb = [1, 2]", "room for a block", "smaller than a block"),
        ),
        (
            {"io_direct": "required"},
            "io_direct is required, and the filesystem of /a can't",
            ("io_direct = 'required'", "true or false on this file system", "/a"),
        ),
    ],
)
def test_what_only_the_native_store_can_refuse_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], text: str, parts: tuple[str, ...]
) -> None:
    """Its field becomes the user's key, with the user's value."""
    from cachestore_connector import opening

    def refuse(options: Any) -> Any:
        raise StoreInvalidArgument(text)

    monkeypatch.setattr(opening, "Store", refuse)
    with pytest.raises(ConfigError) as caught:
        open_store(load(TWO | extra, ENV), "Posix", IDENTITY, (100, 37))
    for part in parts:
        assert part in str(caught.value)


def test_a_refusal_that_is_no_settings_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that no setting made is not blamed on one."""
    from cachestore_connector import opening

    def refuse(options: Any) -> Any:
        raise StoreInvalidArgument("tensor_count 400 is too many")

    monkeypatch.setattr(opening, "Store", refuse)
    with pytest.raises(StoreInvalidArgument):
        open_store(load(TWO, ENV), "Posix", IDENTITY, (100, 37))
