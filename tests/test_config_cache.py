"""config.py: the choice of the pipeline, and the settings of the Cache tier (contract A)."""

from __future__ import annotations

from typing import Any

import pytest

from cachestore_connector.config import CACHE_POSIX, Config, choose_pipeline, load
from cachestore_connector.errors import ConfigError

ENV = {"HOME": "/home/u"}

DEVICE_PATHS = ("cache_io_aggregation", "cache_sdma_direct", "use_gdr")


def refused(extra: Any, *parts: str) -> None:
    """load(extra) raises a ConfigError with each of parts in its message."""
    with pytest.raises(ConfigError) as caught:
        load(extra, ENV)
    for part in parts:
        assert part in str(caught.value)


def chosen(is_mla: bool, **extra: Any) -> tuple[str, str]:
    return choose_pipeline(load(extra, ENV), is_mla)


def test_pipeline_names() -> None:
    """Two pipelines, each in exactly one spelling; a wrong one is refused with what is allowed."""
    for name in ("Posix", CACHE_POSIX):
        assert load({"store_pipeline": name}, ENV).store_pipeline == name
    refused({"store_pipeline": "posix"}, "'posix'", "did you mean Posix?")
    refused({"store_pipeline": "Posix "}, "did you mean Posix?")
    refused({"store_pipeline": "cache|posix"}, "did you mean Cache|Posix?")
    refused({"store_pipeline": "S3"}, "'S3'", "Posix or Cache|Posix, or left out")
    refused({"store_pipeline": ["Posix"]}, "string")


@pytest.mark.parametrize(("is_mla", "pipeline"), [(True, CACHE_POSIX), (False, "Posix")])
def test_the_model_type_decides(is_mla: bool, pipeline: str) -> None:
    """A7: left out, or null, MLA gets Cache|Posix and all others Posix; the reason says so."""
    for extra in ({}, {"store_pipeline": None}):
        got, reason = chosen(is_mla, **extra)
        assert got == pipeline
        assert "store_pipeline is not set" in reason
        assert ("the model is MLA" if is_mla else "the model is not MLA") in reason


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("pipeline", ["Posix", CACHE_POSIX])
def test_a_users_pipeline_wins(pipeline: str, is_mla: bool) -> None:
    """A7: whatever the model; Cache|Posix for an MHA model too."""
    got, reason = chosen(is_mla, store_pipeline=pipeline)
    assert got == pipeline
    assert reason.startswith(f"store_pipeline is set to {pipeline}")


def test_the_reason_has_the_copy_settings() -> None:
    """A7: by itself host-buffer mode, 4 workers, depth 1024, the device paths off; a user's win."""
    _, reason = chosen(True)
    for part in (
        "cache_use_host_buffer true",
        "cache_h2h_worker_number 4",
        "cache_h2h_queue_depth 1024",
        "cache_h2h_cpu_affinity auto",
        *(f"{key} false" for key in DEVICE_PATHS),
    ):
        assert part in reason
    _, reason = chosen(False, store_pipeline=CACHE_POSIX, cache_h2h_worker_number=7)
    assert "cache_h2h_worker_number 7" in reason
    assert "cache_h2h" not in chosen(False)[1]


def test_without_a_host_buffer_there_is_no_cache() -> None:
    """cache_use_host_buffer: false is refused with Cache|Posix, chosen or given, and only there."""
    for extra in ({}, {"store_pipeline": CACHE_POSIX}):
        with pytest.raises(
            ConfigError,
            match=r"cache_use_host_buffer = false.*allowed is true with store_pipeline Cache\|Posix"
            r".*set store_pipeline to Posix",
        ):
            chosen(True, cache_use_host_buffer=False, **extra)
    assert chosen(True, cache_use_host_buffer=False, store_pipeline="Posix")[0] == "Posix"
    assert chosen(False, cache_use_host_buffer=False)[0] == "Posix"


@pytest.mark.parametrize("key", DEVICE_PATHS)
def test_device_paths_are_refused(key: str) -> None:
    """False and null are fine; true is refused with an error that names both keys."""
    assert getattr(load({key: False}, ENV), key) is False
    assert getattr(load({key: None}, ENV), key) is False
    refused({key: True}, f"{key} = true", "allowed is false", "cache_use_host_buffer")
    refused({key: True, "cache_use_host_buffer": False}, key, "cache_use_host_buffer")
    refused({key: 0}, f"{key} = 0")
    refused({key: "false"}, key, "without quotes")


@pytest.mark.parametrize("value", [[1], [], 0, "0x1", False, {}])
def test_device_addresses_are_refused(value: Any) -> None:
    """gpu_kv_buffer_addrs: any value, with an error that names both keys; null is none."""
    refused({"gpu_kv_buffer_addrs": value}, "gpu_kv_buffer_addrs", "cache_use_host_buffer")
    assert load({"gpu_kv_buffer_addrs": None}, ENV).gpu_kv_buffer_addrs is None


@pytest.mark.parametrize("value", [1, 200, 0.25, 1.5, 1e-9, 2**20])
def test_capacity_takes_fractions(value: float) -> None:
    """Whole numbers and fractions of a GiB pass as they are."""
    assert load({"cache_buffer_capacity_gb": value}, ENV).cache_buffer_capacity_gb == value


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (0, ""),
        (-1, ""),
        (-0.5, ""),
        (0.0, ""),
        (2**20 + 1, ""),
        (10**400, ""),
        (float("nan"), ""),
        (float("inf"), ""),
        (True, "not numbers"),
        ("8", "without quotes"),
        ([8], ""),
    ],
    ids=str,
)
def test_capacity_is_bounded(value: Any, hint: str) -> None:
    """F32: the message has the key, the range and the unit."""
    refused({"cache_buffer_capacity_gb": value}, "cache_buffer_capacity_gb", "above 0", hint)
    refused({"cache_buffer_capacity_gb": value}, "up to 1048576 (GiB, of 2**30 bytes)")


@pytest.mark.parametrize("value", ["auto", "none", "0", "0-3,8", "8,0-3", "7-7", "0-65535"])
def test_cpus_that_pass(value: str) -> None:
    """The two words, numbers and ranges, as the kernel writes them."""
    assert load({"cache_h2h_cpu_affinity": value}, ENV).cache_h2h_cpu_affinity == value


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("", "neither a number nor a range"),
        ("0-3,", "'' is neither"),
        ("0-", "'0-' is neither"),
        ("0 - 3", "'0 - 3' is neither"),
        ("-1", "'-1' is neither"),
        ("0x3", "neither"),
        ("٣", "neither"),
        ("Auto", "neither"),
        ("3-0", "the range 3-0 goes down"),
        ("0-4000000000", "above the highest number, 65535"),
        ("0-" + "9" * 5000, "neither"),
        (3, "in quotes"),
        ([0, 1], "in quotes"),
        (True, "in quotes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_cpus_that_are_refused(value: Any, hint: str) -> None:
    """F32: what is wrong with it is said, with an example of what is right."""
    refused({"cache_h2h_cpu_affinity": value}, "cache_h2h_cpu_affinity", '"0-3,8"', hint)


def test_the_buffers_directory_is_a_path() -> None:
    """One absolute path: variables and ~ expand, and it is normalised, as storage_backends is."""

    def directory(value: Any) -> str:
        environ = ENV | {"RUN": "/run/user/7"}
        return load({"cache_buffer_directory": value}, environ).cache_buffer_directory

    assert directory("/dev//shm/") == "/dev/shm"
    assert directory("$RUN/x:y z") == "/run/user/7/x:y z"
    assert directory("~/é") == "/home/u/é"
    for value, hint in (
        ("shm", "not an absolute path"),
        ("", "it is empty"),
        (["/dev/shm"], "must be a string"),
        ("$NO/x", "NO is not defined"),
        ("/a\nb", "control character"),
    ):
        refused({"cache_buffer_directory": value}, "cache_buffer_directory", hint)
    for value in ("/dev/shm/", "shm", "", None, 5):
        with pytest.raises(ConfigError, match="cache_buffer_directory"):
            Config(storage_backends=("/a",), cache_buffer_directory=value)
