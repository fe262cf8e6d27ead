"""The SGLang plugin: its hooks, and what it does when one doesn't fit."""

import argparse
import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cachestore_connector import plugin
from cachestore_connector.errors import CacheStoreError, ConfigError

# Hooks change SGLang for the whole process: each case has a process of its own.
_HEAD = """
import argparse, json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(message)s")
"""


def run(code, **env):
    import os

    environment = {**os.environ, "SGLANG_PLUGINS": "cachestore", **env}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _HEAD + code],
        capture_output=True, text=True, timeout=55, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_loaded_by_its_entry_point():
    """Pinned: installing registers the plugin; SGLang loads it, and all hooks took.

    Also, that it sets the log's level in every process, whether a backend is attached or not.
    """
    code = """
from sglang.srt.plugins import load_plugins
load_plugins()
from cachestore_connector import plugin
plugin._require_hooks()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args(["--model", "m", "--hicache-storage-backend", "cachestore"])
choices = next(a.choices for a in parser._actions if a.dest == "hicache_storage_backend")
levels = [logging.getLogger(name).level for name in ("cachestore", "sglang")]
print(json.dumps([args.hicache_storage_backend, choices, levels]))
"""
    done = run(code, CACHESTORE_LOG_LEVEL="debug")
    value, choices, levels = json.loads(done.stdout.splitlines()[-1])
    assert levels == [logging.DEBUG, logging.NOTSET]
    assert value == "cachestore"
    assert choices.count("cachestore") == 1 and "file" in choices


def test_an_sglang_that_does_not_fit():
    """Pinned: one loud error that says what to do instead; no hook at all is registered."""
    changes = [
        "del cc.HiCacheController.attach_storage_backend",
        "cc.HiCacheController.attach_storage_backend = lambda self, other: None",
    ]
    code = f"""
import os
import sglang.srt.managers.cache_controller as cc
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
for change in {changes!r}:
    child = os.fork()
    if child == 0:
        exec(change)
        load_plugins()
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        print(next(a.choices for a in parser._actions if a.dest == "hicache_storage_backend"))
        break
    assert os.waitpid(child, 0)[1] == 0
"""
    done = run(code)
    errors = [line for line in done.stderr.splitlines() if line.startswith("cachestore ")]
    assert len(errors) == len(changes)
    assert all("attach_storage_backend" in each and "dynamic" in each for each in errors)
    assert done.stdout.count("'file'") == len(changes) and "cachestore" not in done.stdout


def test_hooks_that_did_not_take_are_noticed():
    """Pinned: SGLang only logs a hook that fails to apply, so each hook checks the others."""
    with pytest.raises(CacheStoreError, match=r"not hooked.*dynamic"):
        plugin._offer_choice(None, argparse.ArgumentParser())
    with pytest.raises(CacheStoreError, match="attach_storage_backend is not hooked"):
        plugin._create_backend(None, None, "cachestore", None, None)


def test_other_backends_pass_through():
    """Pinned: with another backend's name every hook does exactly what SGLang did."""
    seen = []

    def original(*args, **kwargs):
        seen.append((args, kwargs))
        return "theirs"

    assert plugin._create_backend(original, "cls", "file", "config", "pool", x=1) == "theirs"
    assert plugin._attach(original, "controller", "mooncake", 256, model_name="m") == "theirs"
    assert seen == [
        (("cls", "file", "config", "pool"), {"x": 1}),
        (("controller", "mooncake", 256), {"model_name": "m"}),
    ]


def test_all_host_pools_are_known_when_the_backend_is_made(monkeypatch, tmp_path):
    """Pinned: what can't be stored is refused where SGLang still takes it as a failed attach."""
    import host_pools
    import side_pools
    from backends import storage_config

    kv = host_pools.mha_pool(layout="page_first")
    entries = [
        SimpleNamespace(name="kv", host_pool=kv),
        SimpleNamespace(name="indexer", host_pool=side_pools.envelope_pool()),
    ]
    controller = SimpleNamespace(
        mem_pool_host=SimpleNamespace(entries=entries),
        _page_get_zero_copy="get", _page_set_zero_copy="set", page_get_func=None,
    )  # fmt: skip
    made = []

    def original(controller, name):  # as HiCacheController.attach_storage_backend
        config = storage_config(tmp_path / "store")
        made.append(plugin._create_backend(None, None, name, config, kv))
        made[-1].register_mem_pool_host(kv)
        return "attached"

    monkeypatch.setattr(plugin, "_require_hooks", lambda: None)
    with pytest.raises(ConfigError, match="indexer: host pool UnifiedPageEnvelopeHostPool"):
        plugin._attach(original, controller, "cachestore")
    assert controller.page_get_func is None and made[-1].counters() == {}
    entries[1].host_pool = side_pools.dsa_pool(layout="page_first")
    assert plugin._attach(original, controller, "cachestore") == "attached"
    assert (controller.page_get_func, controller.page_set_func) == ("get", "set")
    assert set(made[-1]._pools) == {"kv", "indexer"}
    made[-1].close()
    # A controller of one pool has no entries.
    controller.mem_pool_host = kv
    assert plugin._attach(original, controller, "cachestore") == "attached"
    made[-1].close()


def test_every_rank_stores_what_no_other_has():
    """Pinned (F25): SGLang's own answer stands; where it is no, ours counts, for our backend."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

    backend = SimpleNamespace(every_rank_stores=lambda name: name == "draft")
    controller = SimpleNamespace(storage_backend_type="cachestore", storage_backend=backend)
    draft, indexer = SimpleNamespace(name="draft"), SimpleNamespace(name="indexer")

    def says(answer):
        return lambda controller, transfer: answer

    assert plugin._should_backup(says(True), controller, indexer)
    assert plugin._should_backup(says(False), controller, draft)
    assert not plugin._should_backup(says(False), controller, indexer)
    controller.storage_backend = HiCacheStorageFailureInjector(backend, 0, 0)
    assert plugin._should_backup(says(False), controller, draft)
    controller.storage_backend = None
    assert not plugin._should_backup(says(False), controller, draft)
    controller.storage_backend_type, controller.storage_backend = "file", backend
    assert not plugin._should_backup(says(False), controller, draft)


def test_logging_is_under_one_name():
    """Pinned: everything is logged under `cachestore`, so that one line silences or raises it."""
    assert plugin.logger is logging.getLogger("cachestore")


def test_the_source_tree_says_what_to_do():
    """Pinned: started in the repository, Python finds the sources first; the error says so."""
    from pathlib import Path

    done = subprocess.run(
        [sys.executable, "-c", "import cachestore_connector._ffi"],
        capture_output=True, text=True, cwd=Path(__file__).parents[1],
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "PYTHONSAFEPATH=1" in done.stderr


def test_anybodys_wrapper_is_not_our_hook():
    """Pinned: another plugin's hook on the same function doesn't pass for ours."""
    import functools

    def original():
        pass

    def wrapped_by(hook):
        @functools.wraps(original)
        def wrapper():
            return hook, original

        return wrapper

    assert not plugin._is_hooked(original, plugin._attach)
    assert not plugin._is_hooked(wrapped_by(print), plugin._attach)
    ours = wrapped_by(plugin._attach)
    assert plugin._is_hooked(ours, plugin._attach)
    assert plugin._is_hooked(functools.wraps(ours)(lambda: None), plugin._attach)
