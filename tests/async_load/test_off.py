"""The switch off: SGLang's calls, exactly."""

import threading
from unittest import mock

import pytest

from async_load.controllers import DeviceIndices, HostPool, in_thread, queue_load, wire

# One burst of two layers with a fence: every call on streams and events, in order. e1 and e2 are
# the events of the slot's layers, e3 its start event; e11 and e12 are the ack's, with timing.
SEQUENCE = [
    ("query", "e2"),
    ("move",),
    ("record", "e3", "compute"),
    ("wait_stream", "h2d", "forward"),
    ("enter", "h2d"),
    ("event_wait", "e3", "h2d"),
    ("record", "e11t", "h2d"),
    ("copy", "kv", 0),
    ("record", "e1", "h2d"),
    ("copy", "kv", 1),
    ("record", "e2", "h2d"),
    ("record", "e12t", "h2d"),
    ("leave", "h2d"),
    ("done_event", "load"),
]


def fence(device):
    stream = device.Stream()
    stream.name = "forward"
    return stream


def test_off_is_the_default(hooked):
    """Pinned: nobody gets a loader who didn't ask for one."""
    from sglang.srt.environ import envs

    assert envs.SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE.get() is False


def test_off_makes_no_thread(controller):
    """Pinned: the attributes say off, and nothing runs."""
    before = threading.active_count()
    one = controller(False)
    assert threading.active_count() == before
    assert one.async_load_enqueue is False
    assert one.load_enqueue_queue is None
    assert one.load_enqueue_thread is None
    assert one.load_enqueue_error is None
    assert not one.layer_done_counter.events[0].async_enqueue


def burst(one, device, module):
    """One burst; the calls that it made, all on this thread."""
    one.load_fence_stream = fence(device)
    queue_load(one, 10, device_indices=DeviceIndices(device, [4, 5, 6]), module=module)
    start = len(device.log)
    assert one.start_loading() == 0
    assert one.load_queue == []
    assert {entry[-1] for entry in device.log[start:]} == {threading.current_thread().name}
    return device.calls(start)


def test_off_is_the_exact_sequence(controller, device, hooked):
    """Pinned: the calls on streams and events, fence included."""
    calls = burst(controller(False, layers=2), device, hooked)
    assert calls == [*SEQUENCE]


def bare(module, device):
    """A controller that knows nothing of the switch."""
    one = object.__new__(module.HiCacheController)
    return wire(one, device, 2, HostPool(device, 2), module)


@pytest.mark.parametrize("with_fence", [True, False])
def test_off_equals_the_unhooked_class(hooked, unhooked, monkeypatch, with_fence):
    """Pinned: construction, several bursts, and the acks, field by field, are SGLang's own."""
    from sglang.srt.mem_cache import l2_transfer

    from async_load.device import Device

    outcomes = []
    for module in (unhooked, hooked):
        device = Device()
        monkeypatch.setattr(module, "device_module", device)
        monkeypatch.setattr(l2_transfer, "device_module", device)
        l2_transfer._timing_events_supported.cache_clear()
        one = bare(module, device)
        if module is hooked:
            one._init_load_enqueue_thread(False)
        if with_fence:
            one.load_fence_stream = fence(device)
        producers = [one.start_loading()]
        for i in range(5):
            for part in range(i % 2 + 1):
                queue_load(one, 10 * i + part + 1, tokens=2 + part, module=module)
            producers.append(one.start_loading())
            device.now = one.layer_done_counter.events[producers[-1]].finish_event.time
            one.layer_done_counter.set_consumer(producers[-1])
            one.layer_done_counter.wait_until(1)
        acks = [
            (str(ack.start_event), str(ack.finish_event), *tuple(ack)[2:])
            for ack in one.ack_load_queue
        ]
        outcomes.append((producers, device.log, acks, one.has_inflight_device_transfers()))
    l2_transfer._timing_events_supported.cache_clear()
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][2]) == 5
    assert outcomes[0][2][1][2:] == ([11, 12], 5, True, {"kv": 5}, 35)


def test_a_controller_that_was_never_told(hooked, device):
    """Pinned: one built without __init__, on which nothing was called, works inline."""
    one = bare(hooked, device)
    queue_load(one, 1)
    assert one.start_loading() == 0
    assert len(one.ack_load_queue) == 1
    assert one.has_inflight_device_transfers()
    one._drain_load_enqueue()
    one.stop_load_enqueue_thread()
    one.reset()
    assert not one.has_inflight_device_transfers()


def test_a_mock_with_a_spec(hooked, device):
    """Pinned: a mock that has the inline body wired, and nothing else of ours, loads inline."""
    one = mock.Mock(spec=hooked.HiCacheController)
    wire(one, device, 2, HostPool(device, 2), hooked)
    body = hooked.HiCacheController._enqueue_load_burst
    one._enqueue_load_burst = lambda *args, **kwargs: body(one, *args, **kwargs)
    one._move_op_indices = lambda op: (op.host_indices, op.device_indices, None)
    one._l2_load_transfers = lambda *moved: hooked.HiCacheController._l2_transfers(one, *moved)
    queue_load(one, 1)
    assert hooked.HiCacheController.start_loading(one) == 0
    (ack,) = one.ack_load_queue
    assert ack.node_ids == [1]
    assert ack.num_tokens == 3


def test_off_waits_for_no_flag(hooked, device):
    """Pinned: without the handshake an event is SGLang's, whatever is called on it."""
    event = hooked.LayerLoadingEvent(2)
    assert event.is_enqueue_done()
    event.rearm()
    assert event.is_enqueue_done()
    thread, results = in_thread(event.wait, 1)
    thread.join(10)
    assert results == [None]
