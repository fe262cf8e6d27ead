"""The handshake of a slot, and the rotation."""

import threading

import pytest

from async_load.controllers import blocked, ended, in_thread
from cachestore_connector.async_load import waiting
from cachestore_connector.async_load.waiting import LoaderGone


@pytest.fixture
def event(hooked, device):
    return hooked.LayerLoadingEvent(3, async_enqueue=True)


def test_waits_for_the_flag_then_for_the_event(event, device):
    """Pinned (F29): an event that wasn't recorded holds nobody, so the flag comes first."""
    event.rearm()
    thread, results = in_thread(event.wait, 1)
    assert blocked(thread)
    event.complete(0)
    assert blocked(thread)
    assert not any(call[0] == "wait_event" for call in device.calls())
    event.complete(1)
    assert ended(thread)
    assert results == [None]
    calls = device.calls()
    assert calls.index(("record", "e2", "compute")) < calls.index(("wait_event", "compute", "e2"))


def test_a_fresh_slot_holds_no_burst(event):
    """Pinned: nothing is recorded in it, and nothing is queued: the first rotation isn't held."""
    assert event.is_enqueue_done()
    thread, _ = in_thread(event.wait, 0)
    assert blocked(thread)
    event.complete(0)
    assert ended(thread)


def test_rearm_takes_back_every_flag(event):
    """Pinned: the previous burst's flags aren't the next one's."""
    event.rearm()
    for layer in range(3):
        event.complete(layer)
    event.burst_failed = True
    event.mark_enqueue_done()
    assert event.is_enqueue_done()
    event.rearm()
    assert not event.is_enqueue_done()
    assert not event.burst_failed
    threads = [in_thread(event.wait, layer)[0] for layer in range(3)]
    assert all(blocked(thread) for thread in threads)
    event.release_waiters()
    assert all(ended(thread) for thread in threads)


def test_dropping_the_handshake_releases_everybody(event):
    """Pinned: once bursts are enqueued inline nobody waits for a flag, and rearming sets none."""
    event.rearm()
    thread, results = in_thread(event.wait, 2)
    assert blocked(thread)
    event.disable_async_handshake()
    assert ended(thread) and results == [None]
    event.rearm()
    assert event.is_enqueue_done()
    event.wait(0)


def test_turned_on_later_only_armed_slots_hold(hooked, device):
    """Pinned: SGLang's decode batches go on waiting on the slot that their prefill had.

    With bursts enqueued inline meanwhile its flags mean nothing until the slot is armed again.
    """
    event = hooked.LayerLoadingEvent(3)
    event.complete(0)
    event.enable_async_handshake()
    event.wait(0)
    event.wait(2)
    event.rearm()
    event.enable_async_handshake()
    thread, _ = in_thread(event.wait, 2)
    assert blocked(thread)
    event.release_waiters()
    assert ended(thread)


def test_a_loader_that_is_gone_is_an_exception(event, monkeypatch):
    """Pinned: no forward hangs for a thread that doesn't exist any more; what it did counts."""
    event.rearm()
    gate = threading.Event()
    event.loader = threading.Thread(target=gate.wait)
    event.loader.start()
    event.complete(0)
    thread, results = in_thread(event.wait, 1)
    assert blocked(thread)
    gate.set()
    event.loader.join()
    assert ended(thread)
    assert isinstance(results[0], LoaderGone)
    assert "layer 1 of 3" in str(results[0])
    event.wait(0)


def test_a_wait_is_logged_and_ends(event, monkeypatch, caplog):
    """Pinned: a line every 30 s while a flag is unset, and an end to it, whatever happens."""
    assert waiting.LOG_INTERVAL_S == 30
    monkeypatch.setattr(waiting, "LOG_INTERVAL_S", 0.02)
    monkeypatch.setattr(waiting, "LIMIT_S", 0.2)
    event.rearm()
    with (
        caplog.at_level("WARNING", "sglang.srt.managers.cache_controller"),
        pytest.raises(LoaderGone, match="layer 2 of 3"),
    ):
        event.wait(2)
    lines = [record.message for record in caplog.records if "layer 2 of 3" in record.message]
    assert len(lines) >= 2


def test_the_rotation_waits_for_the_flag_before_the_event(hooked, device):
    """Pinned: a queued burst's slot has the previous rotation's finish event, which is done."""
    counter = hooked.LayerDoneCounter(2, async_enqueue=True)
    assert counter.async_enqueue
    assert [counter.update_producer() for _ in range(3)] == [0, 1, 2]
    counter.events[0].rearm()
    start = len(device.log)
    thread, results = in_thread(counter.update_producer)
    assert blocked(thread)
    assert device.log[start:] == []  # not even asked
    counter.events[0].mark_enqueue_done()
    assert ended(thread)
    assert results == [0]
    assert device.calls(start) == [("query", "e2")]


def test_the_rotation_still_asserts(hooked, device):
    """Pinned: an enqueued burst that the device hasn't finished isn't overwritten."""
    counter = hooked.LayerDoneCounter(1, async_enqueue=True)
    counter.update_producer()
    device.default.operate(5.0)
    counter.events[0].complete(0)
    counter.producer_index = -1
    with pytest.raises(AssertionError, match="should be ready"):
        counter.update_producer()
    device.now = 5.0
    counter.producer_index = -1
    assert counter.update_producer() == 0


def test_events_of_another_kind_are_left_alone(hooked, device):
    """Pinned: a counter whose events have a class of their own (FlexKV's) waits for no flag."""
    counter = hooked.LayerDoneCounter(2)

    class Other:
        finish_event = device.Event()

    counter.events = [Other() for _ in range(3)]
    assert counter.update_producer() == 0
