"""`cachestore migrate-config`: UCM's configurations, as its documentation has them, become ours."""

import json
import os

import pytest
import yaml

from cachestore_connector import _ucm_keys, ucm_settings
from cachestore_connector.config import SETTINGS, SGLANG_KEYS, load
from cachestore_connector.errors import ConfigError
from command_line import as_nobody, invoke
from disks import small_disk
from stored_pages import open_place

# What UCM's quickstart for SGLang has its users write.
QUICKSTART = """
kv_connector_extra_config:
  ucm_connector_name: UcmPipelineStore
  ucm_connector_config:
    storage_backends: /mnt/test
"""


def run(*words):
    return invoke("migrate-config", *words)


def written(tmp_path, text, name="ucm.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def migrated(text):
    migration = ucm_settings.migrate(text, "ucm.yaml")
    ours = yaml.safe_load(ucm_settings.text_of(migration, "ucm.yaml"))
    assert ours == migration.given  # the text says the same
    load(ours, {})
    return migration


def connector(**keys):
    """A configuration for SGLang with these keys of the connector."""
    config = {"storage_backends": "/mnt/a", **keys}
    inner = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": config}
    return json.dumps({"kv_connector_extra_config": inner})


def test_the_quickstarts_file(tmp_path):
    """Pinned: SGLang's documented form, as YAML and as the JSON of the command line."""
    as_json = json.dumps(yaml.safe_load(QUICKSTART))
    for path in written(tmp_path, QUICKSTART), written(tmp_path, as_json, "ucm.json"):
        done = run(path)
        assert done.exit_code == 0, done.output
        assert yaml.safe_load(done.stdout) == {"storage_backends": ["/mnt/test"]}
        assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(path) not in line)
        assert "\x1b" not in done.stdout
    assert load(yaml.safe_load(done.stdout), {}).storage_backends == ("/mnt/test",)


@pytest.mark.parametrize(
    "text",
    [
        "ucm_connectors:\n- ucm_connector_name: UcmNfsStore\n"
        "  ucm_connector_config: {storage_backends: /mnt/test}\n",
        "ucm_connector_name: UcmPipelineStore\nucm_connector_config:\n"
        "  storage_backends: /mnt/test\n",
        "storage_backends: /mnt/test\n",
        "kv_connector_extra_config:\n  ucm_connectors:\n"
        "  - ucm_connector_config: {storage_backends: [/mnt/test]}\n",
    ],
)
def test_the_other_forms(text):
    """Pinned: the list that vLLM's connector takes, the older flat form, the connector's keys."""
    assert migrated(text).given == {"storage_backends": ["/mnt/test"]}


def test_keys_of_the_same_name():
    """Pinned: they keep their values, and the device paths that are off are nothing."""
    given = {
        "store_pipeline": "Cache|Posix",
        "timeout_ms": 20000,
        "io_direct": True,
        "share_buffer_enable": False,
        "cache_buffer_capacity_gb": 64,
        "posix_capacity_gb": 1024,
        "cache_use_host_buffer": True,
        "cache_h2h_worker_number": 8,
        "cache_h2h_queue_depth": 2048,
    }
    off = dict.fromkeys(_ucm_keys.DEVICE_PATHS[:3], False)
    migration = migrated(connector(**given, **off))
    assert migration.given == given | {"storage_backends": ["/mnt/a"]}
    assert migration.notes == []


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ({}, True),
        ({"posix_capacity_gb": 0}, True),
        ({"posix_capacity_gb": 10}, False),
        ({"posix_free_space_reserve_gb": 10}, False),
    ],
)
def test_no_limit_is_noted(keys, noted):
    """Pinned: who has no limit is told that nothing is evicted; that alone is status 0."""
    notes = {note.key: note for note in migrated(connector(**keys)).notes}
    assert ("posix_capacity_gb" in notes) == noted
    assert not noted or not notes["posix_capacity_gb"].wants_attention


def test_the_nfs_connector():
    """Pinned: its default of io_direct is ours, and an older name of that is read."""
    text = connector().replace("UcmPipelineStore", "UcmNfsStore")
    assert [note.key for note in migrated(text).notes] == ["posix_capacity_gb"]
    assert migrated(connector(use_direct=True)).given["io_direct"] is True
    assert migrated("storage_backends: /mnt/a\nuse_direct: false\n").given["io_direct"] is False


def test_keys_of_other_stores():
    """Pinned: those that lie in a file for Posix without being used are no matter."""
    first = migrated(connector(yuanrong_host="192.0.2.1")).notes[0]
    assert first.key == "yuanrong_host" and not first.wants_attention


def test_zero_means_none():
    """Pinned: UCM's 0 is no capacity and the default size; ours is the key left out."""
    assert set(migrated(connector(posix_capacity_gb=0, cache_buffer_capacity_gb=0)).given) == {
        "storage_backends"
    }


def test_converted_keys():
    """Pinned: threads for each direction; where eviction begins and ends, in percent."""
    given = migrated(connector(posix_data_trans_concurrency=32)).given
    assert (given["posix_load_worker_number"], given["posix_dump_worker_number"]) == (32, 32)
    given = migrated(connector(posix_data_trans_concurrency=1000)).given
    assert given["posix_load_worker_number"] == 256

    def marks(**keys):
        given = migrated(connector(posix_capacity_gb=10, **keys)).given
        return given["posix_high_watermark_percent"], given["posix_low_watermark_percent"]

    assert marks(posix_gc_trigger_threshold_ratio=0.8) == (80, 72)
    assert marks(posix_gc_recycle_percent=0.5) == (70, 35)
    assert marks(posix_gc_trigger_threshold_ratio=1, posix_gc_recycle_percent=0.2) == (100, 80)


def test_paths_stand_for_themselves():
    """Pinned: UCM expands nothing, so a ``$`` is one here too; empty parts are left out."""
    given = migrated(connector(storage_backends=":/mnt/$HOME:/mnt/b c:")).given
    assert load(given, {"HOME": "/x"}).storage_backends == ("/mnt/$HOME", "/mnt/b c")


def test_sglangs_own_keys_are_kept():
    """Pinned: those of its storage options; not those that name UCM's class to ``dynamic``."""
    text = QUICKSTART + "prefetch_threshold: 256\nmodule_path: ucm.x\nclass_name: Y\n"
    migration = migrated(text)
    assert migration.given["prefetch_threshold"] == 256
    assert [note.key for note in migration.notes if note.line] == ["module_path", "class_name"]
    assert set(_ucm_keys.DYNAMIC_KEYS) < set(SGLANG_KEYS)


def test_keys_without_a_counterpart(tmp_path):
    """Pinned: a comment for each, with its line and the reason; that alone is status 0."""
    text = QUICKSTART + "    posix_io_engine: aio\n    tensor_size: 4096\nuse_layerwise: true\n"
    path = written(tmp_path, text)
    done = run(path)
    assert done.exit_code == 0
    for line, key in ((6, "posix_io_engine: aio"), (7, "tensor_size: 4096"), (8, "use_layerwise")):
        assert f"# line {line}, {key}" in done.stdout
    assert "# io_direct: not given: UCM's default is true" in done.stdout


@pytest.mark.parametrize("key", [*_ucm_keys.NO_COUNTERPART, *_ucm_keys.FILLED_IN])
def test_every_documented_key_is_known(key):
    """Pinned: in the connector, and beside it, none of them is called unknown."""
    for text in connector(**{key: 1}), QUICKSTART + f"{key}: 1\n":
        notes = {note.key: note for note in migrated(text).notes}
        assert key in notes and not notes[key].wants_attention, text
        if key in _ucm_keys.FILLED_IN:
            break


def test_tables_of_keys_agree_with_ours():
    """Pinned: keys that are carried over are settings, and none is in two tables."""
    assert set(_ucm_keys.SAME) <= set(SETTINGS) and set(_ucm_keys.DEVICE_PATHS) <= set(SETTINGS)
    tables = (
        _ucm_keys.SAME,
        _ucm_keys.DEVICE_PATHS,
        _ucm_keys.FILLED_IN,
        _ucm_keys.CONVERTED,
        _ucm_keys.DYNAMIC_KEYS,
        _ucm_keys.NO_COUNTERPART,
    )
    names = [key for table in tables for key in table]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"use_gdr": True}, "not built"),
        ({"cache_h2h_queue_depth": 64}, "128 to 1048576"),
        ({"timeout_ms": "30000"}, "without quotes"),
        ({"posix_gc_trigger_threshold_ratio": 70}, "ratio"),
        ({"posix_data_trans_concurrency": "many"}, "threads"),
        ({"posix_capacty_gb": 5}, "not a key"),
    ],
)
def test_what_can_not_be_had(tmp_path, keys, part):
    """Pinned: a value that ours refuses, and a key that nobody knows: a comment, and status 1."""
    done = run(written(tmp_path, connector(**keys), "ucm.json"), "--json")
    assert done.exit_code == 1, done.output
    answer = json.loads(done.stdout)
    (note,) = [note for note in answer["notes"] if note["wants_attention"]]
    assert note["key"] in keys and part in note["text"]
    assert note["key"] in answer["yaml"] and note["key"] not in answer["settings"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("- a\n", "line 1"),
        ("a: [1\n", "line 2"),
        ("use_layerwise: true\n", "ucm_connector_config"),
        ("kv_connector_extra_config: 3\n", "line 1"),
        (QUICKSTART.replace("UcmPipelineStore", "UcmMooncakeStore"), "line 3"),
        (QUICKSTART + "    store_pipeline: YuanRong|Posix\n", "line 6"),
        (QUICKSTART.replace("/mnt/test", "mnt/test"), "line 5"),
        (QUICKSTART.replace("/mnt/test", "':'"), "line 5"),
        (QUICKSTART.replace("/mnt/test", "/mnt/a:/mnt/a"), "line 5"),
        (QUICKSTART.replace("storage_backends: /mnt/test", "io_direct: true"), "storage_backends"),
        (QUICKSTART + "    storage_backends: /mnt/b\n", "twice"),
        ("ucm_connectors: [{a: 1}, {b: 2}]\n", "there are 2"),
        (QUICKSTART + "x: !!int hello\n", "line 6"),
        (QUICKSTART + "x: !!python/object:os.system y\n", "line 6"),
    ],
)
def test_what_can_not_be_read(text, part):
    """Pinned: an error that says where, and nothing written."""
    with pytest.raises(ConfigError, match=part):
        ucm_settings.migrate(text, "ucm.yaml")


ODD = [
    "null",
    "[]",
    "{}",
    "''",
    "true",
    "-1",
    ".inf",
    ".nan",
    "[[{a: [1]}]]",
    "2001-12-14",
    "!!binary aaaa",
]


@pytest.mark.parametrize("value", ODD)
def test_odd_values(value):
    """Pinned: whatever a key's value is, the answer is settings that can be read, or an error."""
    keys = [
        *SETTINGS,
        *_ucm_keys.NO_COUNTERPART,
        *_ucm_keys.CONVERTED,
        *_ucm_keys.ALIASES,
        *SGLANG_KEYS,
        "kv_connector_extra_config",
        "ucm_connectors",
        "ucm_connector_name",
        "ucm_connector_config",
        "unheard_of",
    ]
    for key in keys:
        for text in (
            f"storage_backends: /a\n{key}: {value}\n",
            QUICKSTART + f"    {key}: {value}\n",
        ):
            try:
                made = ucm_settings.text_of(ucm_settings.migrate(text, "x"), "x")
            except ConfigError:
                continue
            load(yaml.safe_load(made), {})


def test_the_command_s_errors(tmp_path):
    """Pinned: no file, and one that can't be read, are status 3, with --json too."""
    for path in tmp_path / "none", written(tmp_path, "a: [1\n"), tmp_path:
        done = run(path, "-o", tmp_path / "out")
        assert done.exit_code == 3 and str(path) in done.stderr
        assert json.loads(run(path, "--json").stdout)["error"]
    (tmp_path / "latin").write_bytes(b"a: \xe9\n")
    assert run(tmp_path / "latin").exit_code == 3
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path):
    """Pinned: OUT that is there stays, unless --force says otherwise; FILE itself always stays."""
    path, out = written(tmp_path, QUICKSTART), tmp_path / "out.yaml"
    assert run(path, "-o", out).exit_code == 0
    first = out.read_text()
    assert yaml.safe_load(first) == {"storage_backends": ["/mnt/test"]}
    out.write_text("mine")
    done = run(path, "-o", out)
    assert done.exit_code == 3 and "--force" in done.stderr
    assert out.read_text() == "mine"
    assert run(path, "-o", out, "--force").exit_code == 0
    assert out.read_text() == first
    assert run(path, "-o", path, "--force").exit_code == 3
    assert path.read_text() == QUICKSTART
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.yaml", "ucm.yaml"]


def test_a_full_disk(tmp_path):
    """Pinned: nothing half-written is left, and what --force would have replaced is as it was."""
    path = written(tmp_path, QUICKSTART + "".join(f"x{i}: {'y' * 90}\n" for i in range(200)))
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        assert run(path, "-o", disk / "out").exit_code == 3
        assert list(disk.iterdir()) == []
        (disk / "old").write_text("mine")
        assert run(path, "-o", disk / "old", "--force").exit_code == 3
        assert [each.name for each in disk.iterdir()] == ["old"]
        assert (disk / "old").read_text() == "mine"


def test_another_users_directory():
    """Pinned: OUT in a directory that isn't this user's: status 3, in one line."""
    with open_place() as place:
        path = place / "ucm.yaml"
        path.write_text(QUICKSTART)
        done = as_nobody("migrate-config", path, "-o", place / "out.yaml")
        assert os.listdir(place) == ["ucm.yaml"]
    assert done.returncode == 3, done.stderr
    assert "Permission denied" in done.stderr and "Traceback" not in done.stderr
