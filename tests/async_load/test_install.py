"""Setting the hooks, through the plugin; starting and stopping with what the controller serves."""

import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from async_load.controllers import blocked, ended, in_thread, queue_load
from cachestore_connector.async_load import failed_bursts

SWITCH = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"


@pytest.fixture(scope="module")
def said():
    """What ``process.py`` said, by the first key of each line."""
    here = Path(__file__).parent
    env = {
        **os.environ,
        "SGLANG_PLUGINS": "cachestore",
        SWITCH: "1",
        "PYTHONPATH": str(here.parent),
    }
    done = subprocess.run(
        [sys.executable, "-P", str(here / "process.py")],
        capture_output=True, text=True, timeout=110, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    objects = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [(next(iter(each)), each) for each in objects]


def one_of(said, key):
    (found,) = [each for first, each in said if first == key]
    return found


@pytest.mark.timeout(300)
def test_code_that_we_do_not_know(said):
    """Pinned: one clear error that names what differs, no hook, and SGLang's own code stays.

    Replaced, wrapped or gone, it is found. Without the switch nobody is told.
    """
    cases = [each for first, each in said if first == "unknown"]
    assert [each["unknown"] for each in cases] == [
        "HiCacheController.start_loading",
        "LayerLoadingEvent.wait",
        "LayerDoneCounter.update_producer",
    ]
    for each in cases:
        installed, (line,) = each["wanted"]
        assert not installed
        assert line.startswith("ERROR CacheStore: " + SWITCH)
        assert "inline" in line and "0.5.23" in line
        assert line.endswith(" " + each["unknown"])
        assert each["unwanted"] == [False, []]
        assert each["clean"]


@pytest.mark.timeout(300)
def test_sglangs_own_switch_wins(said):
    """Pinned: where SGLang brings the switch itself ours steps aside, and says so in one line."""
    case = one_of(said, "own_switch")
    assert case["own_switch"] is False
    assert case["clean"]
    (line,) = case["lines"]
    assert line.startswith("INFO ") and "steps aside" in line


@pytest.mark.timeout(300)
def test_by_the_entry_point(said):
    """Pinned: SGLang loads the plugin; the switch is a field of its own that reads the environment.

    Registering again changes nothing. Another plugin's hook on the same method works with ours.
    """
    case = one_of(said, "entry_point")
    assert case["entry_point"] is True
    assert case["field"] == [SWITCH, False, True, False]
    assert case["exported"] == "1"
    assert case["again_changes_nothing"]
    assert case["lines"] == []
    assert one_of(said, "hooked_by_another_too")["hooked_by_another_too"]


@pytest.mark.timeout(300)
def test_the_end_of_a_process_with_bursts_queued(said):
    """Pinned: a process that ends with bursts on the loader serves them, and ends."""
    assert one_of(said, "hooked_by_another_too")["queued"] == 2
    assert one_of(said, "end") == {"end": 2, "stopped": True}


@pytest.mark.parametrize("end", ["release_host_resources", "shutdown"])
def test_stopped_before_what_it_uses_goes(controller, tree, end):
    """Pinned: the tree's end serves what is queued before the host pools are destroyed."""
    one = controller(True)
    seen = []
    this = tree(one, _storage_attachment=None)
    this.host_pool_group = types.SimpleNamespace(
        destroy=lambda: seen.append((len(one.ack_load_queue), one.load_enqueue_thread))
    )
    reached, gate = one.mem_pool_host.hold(1, 1)
    for node in (1, 2):
        queue_load(one, node)
        one.start_loading()
    assert reached.wait(10)
    thread, results = in_thread(getattr(this, end))
    assert blocked(thread)
    assert seen == []
    gate.set()
    assert ended(thread) and results == [None]
    assert len(one.ack_load_queue) == 2
    assert one.load_enqueue_thread is None
    assert seen == ([(2, None)] if end == "release_host_resources" else [])


def test_detach_starts_it_again(controller, monkeypatch, hooked):
    """Pinned: a detach runs with the loader stopped; load-backs from host memory go on after it.

    Not after the tree's shutdown, which detaches too.
    """
    one = controller(True)
    seen = []
    monkeypatch.setattr(
        hooked.HiCacheController,
        "_stop_storage_threads",
        lambda self: seen.append(self.load_enqueue_thread),
    )
    one.prefetch_hits_sync_groups, one.prefetch_completion_sync_groups = [], []
    first = one.load_enqueue_thread
    one.detach_storage_backend()
    assert seen == [None]
    assert not first.is_alive()
    assert one.load_enqueue_thread.is_alive()
    queue_load(one, 1)
    one.start_loading()
    one._drain_load_enqueue()
    assert len(one.ack_load_queue) == 1
    one.load_enqueue_closed = True
    one.detach_storage_backend()
    assert seen == [None, None]
    assert one.load_enqueue_thread is None
    assert not one.layer_done_counter.async_enqueue


def test_a_detach_without_the_loader_starts_none(controller, monkeypatch, hooked):
    """Pinned: off stays off."""
    one = controller(False)
    monkeypatch.setattr(hooked.HiCacheController, "_stop_storage_threads", lambda self: None)
    one.prefetch_hits_sync_groups, one.prefetch_completion_sync_groups = [], []
    one.detach_storage_backend()
    assert one.load_enqueue_thread is None


def test_the_scheduler_is_guarded(monkeypatch, caplog):
    """Pinned: a controller with a loader hooks the scheduler of its process, once.

    One whose `run_batch` doesn't fit gets no loader: stale KV could be answered from.
    """

    class Scheduler:
        def run_batch(self, batch, pp_proxy_tensors=None):
            return batch

    module = types.SimpleNamespace(Scheduler=Scheduler)
    monkeypatch.setitem(sys.modules, failed_bursts._SCHEDULER, module)
    original = Scheduler.run_batch
    assert failed_bursts.guard_scheduler()
    assert failed_bursts.guard_scheduler()
    assert Scheduler.run_batch.__wrapped__ is original
    Scheduler.run_batch = lambda self, work: None
    with caplog.at_level(logging.ERROR, "cachestore"):
        assert not failed_bursts.guard_scheduler()
    assert "run_batch takes ['self', 'work']" in caplog.text
    monkeypatch.delitem(sys.modules, failed_bursts._SCHEDULER)
    assert failed_bursts.guard_scheduler()


@pytest.mark.parametrize(("wanted", "fits"), [(True, True), (True, False), (False, True)])
def test_the_constructor_reads_the_switch(hooked, device, monkeypatch, wanted, fits):
    """Pinned: on if the environment says so, and the scheduler can be guarded."""
    from sglang.srt.environ import envs

    from async_load.controllers import HostPool, wire
    from cachestore_connector.async_load import lifecycle

    monkeypatch.setattr(lifecycle, "guard_scheduler", lambda: fits)
    one = object.__new__(hooked.HiCacheController)

    def original(self, pool, *, layers):
        wire(self, device, layers, pool, hooked)

    with envs.SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE.override(wanted):
        lifecycle.controller_init(original, one, HostPool(device, 2), layers=2)
    assert one.async_load_enqueue is (wanted and fits)
    assert one.layer_done_counter.async_enqueue is (wanted and fits)
    one.stop_load_enqueue_thread()
