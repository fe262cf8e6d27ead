"""`cachestore doctor`: the command, and what it says of settings."""

import json

import pytest

from cachestore_connector.cli import doctor_config
from cachestore_connector.config import load
from command_line import as_nobody, invoke
from stored_pages import open_place

ENV = {"HOME": "/home/nobody"}


def run(*words, **environ):
    return invoke("doctor", "--no-sglang", *words, env={"CACHESTORE_CONFIG": ""} | environ)


def settings_file(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def config(**given):
    return load(given, ENV)


def test_every_line_says_how_bad_it_is(tmp_path):
    """Pinned: OK, WARN or FAIL, what, and for the last two what to do; no colours in a pipe."""
    path = settings_file(tmp_path, f"storage_backends: [{tmp_path}/store]\nposix_capacity_gb: 1\n")
    done = run("--config", path)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    heads = [line for line in lines if line and not line.startswith(" ")]
    assert all(line.startswith(("OK    ", "WARN  ", "FAIL  ")) for line in heads[:-1])
    assert heads[-1].endswith(" 0 FAIL")
    assert not (tmp_path / "store").exists()  # nothing is changed
    for finding in json.loads(run("--config", path, "--json").stdout)["findings"]:
        assert finding["level"] == "OK" or finding["do"], finding
        assert finding["what"]


def test_a_failure_is_status_1(tmp_path):
    """Pinned: 1 with a FAIL, also with --json, which is one value and the same findings."""
    (tmp_path / "file").write_text("")
    path = settings_file(tmp_path, f"storage_backends: [{tmp_path}/file]\n")
    done = run("--config", path)
    assert done.exit_code == 1
    assert "is not a directory" in " ".join(done.stdout.split())
    as_json = run("--config", path, "--json")
    assert as_json.exit_code == 1
    answer = json.loads(as_json.stdout)
    assert answer["count"]["FAIL"] == 1
    assert [each["check"] for each in answer["findings"] if each["level"] == "FAIL"] == [
        "directory"
    ]


def test_every_wrong_key_is_named_with_its_line(tmp_path):
    """Pinned: all at once, each with file and line, and the rest is checked all the same."""
    text = f"""storage_backends: [{tmp_path}/store]
timeout_ms: soon
posix_quue_depth: 1024
cache_dirty_percent: 99
"""
    path = settings_file(tmp_path, text)
    found = json.loads(run("--config", path, "--json").stdout)["findings"]
    wrong = [each["what"] for each in found if each["level"] == "FAIL"]
    assert len(wrong) == 3
    for line, part in ((2, "timeout_ms"), (3, "did you mean posix_queue_depth"), (4, "1 to 87")):
        assert any(f"{path} line {line}" in what and part in what for what in wrong), wrong
    assert any(f"{tmp_path}/store" in each["what"] for each in found if each["level"] == "OK")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1\n", "line 2"),
        ("a:\n\t- 1\n", "line 2"),
        ("posix_low_watermark_percent: 98\n", "line 1"),
        ("storage_backends: [/a]\nposix_capacity_gb: [1, 2]\n", "line 2"),
    ],
)
def test_what_can_not_be_used_at_all(tmp_path, text, part):
    """Pinned: a file that isn't YAML, and settings that don't go together, with the line."""
    done = run("--config", settings_file(tmp_path, text), "--json")
    assert done.exit_code == 1
    (first, *_) = json.loads(done.stdout)["findings"]
    assert first["level"] == "FAIL" and part in first["what"], first
    assert "file that is there" not in first["do"]  # it is


def test_no_file_is_said(tmp_path):
    """Pinned: a file that isn't there fails; without any the defaults are looked at."""
    done = run("--config", tmp_path / "none.yaml")
    assert done.exit_code == 1 and "none.yaml" in done.stdout
    done = run(HOME=str(tmp_path))
    assert "the defaults are looked at" in " ".join(done.stdout.split())
    path = settings_file(tmp_path, "timeout_ms: 0\n")
    assert "timeout_ms" in run(CACHESTORE_CONFIG=str(path)).stdout


def test_nothing_evicted_is_a_warning():
    """Pinned: without a limit a warning, with either of them none."""
    assert doctor_config.eviction(config()).level == "WARN"
    assert doctor_config.eviction(config(posix_capacity_gb=10)).level == "OK"
    assert doctor_config.eviction(config(posix_free_space_reserve_gb=10)).level == "OK"


def test_a_pipeline_that_can_not_start():
    """Pinned: what MLA models would be refused with is a failure here."""
    found = doctor_config.pipeline(config(cache_use_host_buffer=False))
    assert found.level == "FAIL" and "cache_use_host_buffer" in found.what
    found = doctor_config.pipeline(config(cache_use_host_buffer=False, store_pipeline="Posix"))
    assert found.level == "OK"


def test_another_users_directory(tmp_path):
    """Pinned: run as a user who may not write there, it fails, and names the owner."""
    with open_place() as place:
        store = place / "store"
        store.mkdir(0o755)
        path = place / "c.yaml"
        path.write_text(f"storage_backends: [{store}]\n")
        done = as_nobody("doctor", "--no-sglang", "--json", "--config", path)
    assert done.returncode == 1, done.stderr
    failed = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "FAIL"]
    assert failed and "belongs to 0" in failed[0]["what"] and "65534" in failed[0]["what"]
