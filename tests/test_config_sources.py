"""config.py: where settings come from: extra config, the file, the defaults (F32)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cachestore_connector.config import SETTINGS, SGLANG_KEYS, load
from cachestore_connector.errors import ConfigError
from given_settings import ENV, refused, settings_file


def test_extra_config_wins_per_setting_over_the_file(tmp_path: Path) -> None:
    """Each setting comes from the first source that gives it, not each source as a whole."""
    environ = settings_file(tmp_path, "timeout_ms: 1000\nposix_queue_depth: 256\n")
    config = load({"timeout_ms": 2000}, environ)
    assert (config.timeout_ms, config.posix_queue_depth) == (2000, 256)
    assert config.posix_load_worker_number == 8


def test_null_is_as_good_as_leaving_the_key_out(tmp_path: Path) -> None:
    """Null gives the default, and lets the file's value through."""
    assert load(dict.fromkeys(SETTINGS), ENV) == load(None, ENV)
    environ = settings_file(tmp_path, "timeout_ms: 1000\nio_direct:\n")
    assert load({"timeout_ms": None}, environ).timeout_ms == 1000
    assert load(None, environ).io_direct is False


def test_extra_config_is_not_changed() -> None:
    """SGLang's mapping is left as it was, and its list isn't kept."""
    extra = {"storage_backends": ["/a", "/b"], "prefetch_threshold": 1}
    config = load(extra, ENV)
    assert extra == {"storage_backends": ["/a", "/b"], "prefetch_threshold": 1}
    extra["storage_backends"].append("/c")  # type: ignore[attr-defined]
    assert config.storage_backends == ("/a", "/b")


@pytest.mark.parametrize("extra", ["{}", ["a"], 8, True])
def test_extra_config_must_be_a_mapping(extra: Any) -> None:
    """A string or a list in place of the mapping is said to be one."""
    refused(extra, "extra config", "mapping")


def test_sglangs_own_keys_are_ignored(tmp_path: Path) -> None:
    """SGLang's keys, which one of its paths leaves in, change nothing, whatever their value."""
    extra = {key: {"any": "thing"} for key in SGLANG_KEYS}
    assert load(extra, ENV) == load(None, ENV)
    environ = settings_file(tmp_path, "prefetch_threshold: 5\ninterface_v1: 1\n")
    assert load(None, environ) == load(None, ENV)
    assert len(SGLANG_KEYS) == 10


def test_empty_variable_means_no_file() -> None:
    """CACHESTORE_CONFIG set to nothing is not a file named ''."""
    assert load(None, ENV | {"CACHESTORE_CONFIG": ""}) == load(None, ENV)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_a_file_without_settings_gives_the_defaults(tmp_path: Path, text: str) -> None:
    """A file in which everything is commented out is not an error."""
    assert load(None, settings_file(tmp_path, text)) == load(None, ENV)


def test_json_file_and_json_in_yaml(tmp_path: Path) -> None:
    """JSON is read by its suffix, tabs included, and as YAML; a byte order mark is no matter."""
    text = json.dumps({"timeout_ms": 1000, "storage_backends": ["/d/é:x"]}, indent="\t")
    assert load(None, settings_file(tmp_path, text, "c.json")).storage_backends == ("/d/é:x",)
    text = json.dumps({"timeout_ms": 1000})
    for name in ("c.json", "c.yaml"):
        assert load(None, settings_file(tmp_path, "\ufeff" + text, name)).timeout_ms == 1000
    assert load(None, settings_file(tmp_path, text, "c.yaml")).timeout_ms == 1000


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "not a mapping"),
        ("just words\n", "not a mapping"),
        ("timeout_ms: [1\nio_direct: }\n", "line 2"),
        ("timeout_ms: 1000\n\ttimeout_ms: 1\n", "line 2"),
        ("timeout_ms: 1000\nio_direct: true\ntimeout_ms: 2000\n", "line 3"),
        ("? [a, b]\n: 1\n", "line 1"),
        ("timeout_ms: !!python/object:os.system x\n", "line 1"),
        ("timeout_ms: 1000\n---\ntimeout_ms: 1000\n", "line 2"),
        ("timeout_ms: 1000\nmodel_identity: \x07\n", "line 2"),
    ],
    ids=str,
)
def test_unusable_file_is_named_with_its_line(tmp_path: Path, text: str, part: str) -> None:
    """Broken YAML, a list, a doubled key: the message has the path and where YAML gives it."""
    environ = settings_file(tmp_path, text)
    path = environ["CACHESTORE_CONFIG"]
    refused(None, "CACHESTORE_CONFIG", path, part, environ=environ)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"timeout_ms": 1', "line 1"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[1]", "mapping"),
    ],
)
def test_unusable_json_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    """The same for JSON."""
    environ = settings_file(tmp_path, text, "c.json")
    refused(None, environ["CACHESTORE_CONFIG"], part, environ=environ)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing file, a directory and bytes that aren't UTF-8 are errors, never the defaults."""
    (tmp_path / "latin.yaml").write_bytes(b"model_identity: caf\xe9\n")
    for name, part in (
        ("gone.yaml", "No such file"),
        ("", "Is a directory"),
        ("latin.yaml", "utf-8"),
        ("nul\0.yaml", "null"),
    ):
        path = os.path.join(tmp_path, name)
        refused(None, repr(path), part, environ=ENV | {"CACHESTORE_CONFIG": path})


def test_file_name_may_start_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service file can say CACHESTORE_CONFIG=~/c.yaml, which no shell expands there."""
    environ = settings_file(tmp_path, "timeout_ms: 1000\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(None, environ | {"CACHESTORE_CONFIG": "~/c.yaml"}).timeout_ms == 1000


def test_error_says_where_the_value_came_from(tmp_path: Path) -> None:
    """Path and line for the file; "extra config" for the other; also a file value overridden."""
    environ = settings_file(tmp_path, "# first\n\ntimeout_ms: 5\n")
    where = environ["CACHESTORE_CONFIG"] + " line 3"
    refused(None, "timeout_ms = 5", where, environ=environ)
    refused({"timeout_ms": 1000}, "timeout_ms = 5", where, environ=environ)
    refused({"timeout_ms": 5}, "timeout_ms = 5", "extra config")
    environ = settings_file(tmp_path, "io_direct: true\ntimeout: 5\n")
    refused(None, "timeout = 5", "line 2", "did you mean timeout_ms", environ=environ)


@pytest.mark.parametrize(
    "line",
    ["io_direct: !!timestamp foo", "timeout_ms: !!int ''", "timeout_ms: !!float ''",
     "io_direct: !!bool maybe", "!!timestamp x: 1"],
)  # fmt: skip
def test_a_tag_on_the_wrong_kind_of_value(tmp_path, line):
    """Pinned (F32): PyYAML's own exceptions for these don't get out."""
    path = tmp_path / "c.yaml"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load({}, {"CACHESTORE_CONFIG": str(path), "HOME": str(tmp_path)})
