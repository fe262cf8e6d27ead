"""The loader: who does what, on which thread, in which order."""

import logging
import threading

import pytest

from async_load.controllers import (
    DeviceIndices,
    blocked,
    ended,
    in_thread,
    queue_load,
)
from async_load.device import Stream
from cachestore_connector.async_load.waiting import LoaderGone

LOADER = "hicache-load-enqueue"


def drained(one):
    one._drain_load_enqueue()
    return one


def by_thread(device, start=0):
    """The calls of this thread, and of the loader."""
    mine = threading.current_thread().name
    log = device.log[start:]
    return (
        [entry[:-1] for entry in log if entry[-1] == mine],
        [entry[:-1] for entry in log if entry[-1] == LOADER],
    )


def test_activation_is_logged(controller, caplog):
    """Pinned: one line says whether it is on, and for which class."""
    with caplog.at_level(logging.INFO, "sglang.srt.managers.cache_controller"):
        one = controller(True)
        controller(False)
    lines = [record.message for record in caplog.records if "async load enqueue" in record.message]
    assert lines == [
        "HiCache async load enqueue: enabled (HiCacheController)",
        "HiCache async load enqueue: disabled (HiCacheController)",
    ]
    assert one.load_enqueue_thread.name == LOADER
    assert one.load_enqueue_thread.daemon
    assert one.layer_done_counter.async_enqueue
    assert all(event.async_enqueue for event in one.layer_done_counter.events)


def test_hand_out_is_synchronous_and_the_enqueue_is_not(controller, device):
    """Pinned: what each of the two threads does, call by call, with a fence."""
    one = controller(True, layers=2)
    one.load_fence_stream = Stream(device, "forward")
    reached, gate = one.mem_pool_host.hold(10, 0)
    queue_load(one, 10, device_indices=DeviceIndices(device, [4, 5, 6]))
    start = len(device.log)
    assert one.start_loading() == 0
    assert one.load_queue == []
    assert one.ack_load_queue == []
    assert reached.wait(10)
    gate.set()
    drained(one)
    mine, loaders = by_thread(device, start)
    assert mine == [
        ("query", "e2"),
        ("record", "e3", "compute"),
        ("record", "e10", "forward"),
        ("done_event", "load"),
    ]
    assert loaders == [
        ("enter", "h2d"),
        ("event_wait", "e3", "h2d"),
        ("move",),
        ("leave", "h2d"),
        ("wait_event", "h2d", "e10"),
        ("enter", "h2d"),
        ("event_wait", "e3", "h2d"),
        ("record", "e12t", "h2d"),
        ("copy", "kv", 0),
        ("record", "e1", "h2d"),
        ("copy", "kv", 1),
        ("record", "e2", "h2d"),
        ("record", "e13t", "h2d"),
        ("leave", "h2d"),
    ]


def test_nothing_queued_is_no_burst(controller):
    """Pinned: -1, no slot, no ack."""
    one = controller(True)
    assert one.start_loading() == -1
    assert one.layer_done_counter.producer_index == -1
    assert one.outstanding_load_bursts() == 0


def test_bound_to_the_schedulers_device(controller, device):
    """Pinned: a new thread starts on the first device; the loader goes to the scheduler's."""
    one = controller(True)
    queue_load(one, 1)
    one.start_loading()
    drained(one)
    assert device.device_of_thread[LOADER] == 3
    loaders = by_thread(device)[1]
    assert loaders[0] == ("set_device", 3)


def test_a_device_that_can_not_be_bound_fails_every_burst(controller, device, monkeypatch, caplog):
    """Pinned: nothing is enqueued on the wrong device."""

    def refuse(_):
        raise ValueError("no such device")

    monkeypatch.setattr(device, "set_device", refuse)
    one = controller(True)
    for i in (1, 2):
        queue_load(one, i)
        one.start_loading()
    drained(one)
    assert one.mem_pool_host.copied == {}
    assert [ack.num_tokens for ack in one.ack_load_queue] == [0, 0]
    assert "no such device" in str(one.load_enqueue_error)


def test_the_index_move_is_ordered_after_the_allocator(controller, device):
    """Pinned: indices are read on the stream that waited for their writer, and come out right."""
    one = controller(True)
    indices = DeviceIndices(device, [7, 8, 9])
    assert list(indices._values) == [7, 8, 9]
    with device.stream(Stream(device, "unordered")):
        assert indices.cpu().tolist() == [-1, -1, -1]  # the sentinel is one
    seen = []
    real = one._l2_load_transfers
    one._l2_load_transfers = lambda host, dev, extra: seen.append(dev.tolist()) or real(host, dev)
    queue_load(one, 1, device_indices=indices)
    one.start_loading()
    drained(one)
    assert seen == [[7, 8, 9]]
    assert one.l2_transfer_engine.host_to_device_stream in indices.kept_for


def test_the_fence_is_what_it_was_at_hand_over(controller, device):
    """Pinned (F30): copies come after the forwards launched before, and not after later ones."""
    one = controller(True)
    forward = Stream(device, "forward")
    one.load_fence_stream = forward
    before = forward.operate(1.0)
    reached, gate = one.mem_pool_host.hold(1, 0)
    other = one.mem_pool_host.hold(9, 0)
    queue_load(one, 9)
    one.start_loading()  # keeps the loader busy: the next burst's fence is waited for later
    queue_load(one, 1)
    one.start_loading()
    later = forward.operate(100.0)
    other[1].set()
    assert reached.wait(10)
    h2d = one.l2_transfer_engine.host_to_device_stream
    assert h2d.comes_after(before)
    assert not h2d.comes_after(later)
    gate.set()


def test_ops_are_merged_by_the_scheduler(controller, device, hooked, monkeypatch):
    """Pinned: tensors are concatenated on the compute stream, before the start event."""
    one = controller(True)
    calls = []
    real = hooked.CacheOperation.merge_ops

    def merge(ops):
        calls.append((threading.current_thread().name, len(device.log)))
        return real(ops)

    monkeypatch.setattr(hooked.CacheOperation, "merge_ops", staticmethod(merge))
    queue_load(one, 1, tokens=2)
    queue_load(one, 5, tokens=4)
    one.start_loading()
    drained(one)
    ((name, at),) = calls
    assert name == threading.current_thread().name
    assert at <= device.calls().index(("record", "e4", "compute"))
    (ack,) = one.ack_load_queue
    assert ack.node_ids == [1, 5]


def test_the_ack_comes_after_the_last_layer(controller, device):
    """Pinned: not before, and every field is that of an inline ack."""
    one = controller(True)
    reached, gate = one.mem_pool_host.hold(1, 2)
    queue_load(one, 1, tokens=4)
    one.start_loading()
    assert reached.wait(10)
    assert one.ack_load_queue == []
    assert one.outstanding_load_bursts() == 1
    gate.set()
    drained(one)
    (ack,) = one.ack_load_queue
    assert ack.node_ids == [1]
    assert ack.num_tokens == 4
    assert ack.timing_enabled is True
    assert ack.num_tokens_by_pool == {"kv": 4}
    assert ack.num_bytes == 28
    assert ack.start_event.time < ack.finish_event.time
    assert ack.start_event.elapsed_time(ack.finish_event) == 3000
    assert ack.finish_event.clock["h2d"] == 3


def test_every_layer_completes(controller, device):
    """Pinned: a consumer that waits for a layer comes after that layer's copy, for each layer."""
    one = controller(True, layers=5)
    queue_load(one, 1)
    slot = one.start_loading()
    one.layer_done_counter.set_consumer(slot)
    for layer in range(5):
        one.layer_done_counter.wait_until(layer)
        copies = one.mem_pool_host.copied[1]
        assert device.default.comes_after(copies[layer])
    drained(one)


def test_the_consumer_is_blocked_at_the_next_layer(controller, device):
    """Pinned: with the loader held after layer k a forward passes k, and stands at k + 1."""
    one = controller(True, layers=4)
    reached, gate = one.mem_pool_host.hold(1, 2)
    queue_load(one, 1)
    one.layer_done_counter.set_consumer(one.start_loading())
    passed = []

    def forward():
        for layer in range(4):
            one.layer_done_counter.wait_until(layer)
            passed.append(layer)

    thread, _ = in_thread(forward)
    assert reached.wait(10)
    assert blocked(thread)
    assert passed == [0, 1]
    gate.set()
    assert ended(thread)
    assert passed == [0, 1, 2, 3]


def test_bursts_complete_in_order(controller):
    """Pinned: one queue, one consumer: copies and acks in the order of hand-out."""
    one = controller(True)
    reached, gate = one.mem_pool_host.hold(1, 0)
    for node in (1, 2, 3):
        queue_load(one, node)
        one.start_loading()
    assert reached.wait(10)
    assert list(one.mem_pool_host.copied) == []
    gate.set()
    drained(one)
    assert list(one.mem_pool_host.copied) == [1, 2, 3]
    assert [ack.node_ids for ack in one.ack_load_queue] == [[1], [2], [3]]


def test_a_slot_is_not_reused_under_a_queued_burst(controller, device):
    """Pinned: the fourth hand-out waits for the first burst, although its event says done."""
    one = controller(True)
    one.mem_pool_host.seconds = 0.0  # what is enqueued is done
    _, gate = one.mem_pool_host.hold(1, 1)
    for node in (1, 2, 3):
        queue_load(one, node)
        one.start_loading()
    assert one.layer_done_counter.events[0].finish_event.query()
    queue_load(one, 4)
    thread, results = in_thread(one.start_loading)
    assert blocked(thread)
    gate.set()
    assert ended(thread)
    assert results == [0]
    drained(one)
    assert [ack.node_ids for ack in one.ack_load_queue] == [[1], [2], [3], [4]]


def test_reset_does_not_resurrect_an_ack(controller):
    """Pinned: what the loader still had comes before the clear, and nothing after it."""
    one = controller(True)
    reached, gate = one.mem_pool_host.hold(1, 1)
    queue_load(one, 1)
    one.start_loading()
    queue_load(one, 2)
    one.start_loading()
    assert reached.wait(10)
    thread, results = in_thread(one.reset)
    assert blocked(thread)
    gate.set()
    assert ended(thread) and results == [None]
    assert one.ack_load_queue == []
    assert one.outstanding_load_bursts() == 0
    assert not one.has_inflight_device_transfers()
    queue_load(one, 3)
    one.start_loading()
    drained(one)
    assert [ack.node_ids for ack in one.ack_load_queue] == [[3]]


def test_acks_are_appended_under_the_lock(controller):
    """Pinned: whoever holds it sees no ack come, and no burst counted twice or not at all."""
    one = controller(True)
    with one._ack_load_lock:
        pass
    queue_load(one, 1)
    reached, gate = one.mem_pool_host.hold(1, 2)
    one.start_loading()
    assert reached.wait(10)
    with one._ack_load_lock:
        gate.set()
        assert blocked(one.load_enqueue_thread, 0.2)
        assert one.ack_load_queue == []
    drained(one)
    assert one.outstanding_load_bursts() == len(one.ack_load_queue) == 1


def test_shutdown_serves_what_is_queued_and_falls_back(controller, device):
    """Pinned: a stop joins, drops the handshake, and the next burst is enqueued inline."""
    one = controller(True)
    thread = one.load_enqueue_thread
    _, gate = one.mem_pool_host.hold(1, 0)
    for node in (1, 2):
        queue_load(one, node)
        one.start_loading()
    stop, _ = in_thread(one.stop_load_enqueue_thread)
    assert blocked(stop)
    gate.set()
    assert ended(stop)
    assert not thread.is_alive()
    assert one.async_load_enqueue is False
    assert one.load_enqueue_queue is one.load_enqueue_thread is None
    assert [ack.node_ids for ack in one.ack_load_queue] == [[1], [2]]
    one.stop_load_enqueue_thread()

    start = len(device.log)
    queue_load(one, 3)
    slot = one.start_loading()
    assert [ack.node_ids for ack in one.ack_load_queue] == [[1], [2], [3]]
    assert LOADER not in {entry[-1] for entry in device.log[start:]}
    one.layer_done_counter.set_consumer(slot)
    one.layer_done_counter.wait_until(0)


def test_a_loader_that_does_not_end_keeps_the_handshake(controller, monkeypatch, caplog):
    """Pinned: a stop is bounded; while the loader runs, no forward goes past its layers."""
    from cachestore_connector.async_load import controller as ours

    monkeypatch.setattr(ours, "JOIN_TIMEOUT_S", 0.1)
    one = controller(True)
    reached, gate = one.mem_pool_host.hold(1, 0)
    queue_load(one, 1)
    one.layer_done_counter.set_consumer(one.start_loading())
    assert reached.wait(10)
    one.stop_load_enqueue_thread()
    assert "didn't end" in caplog.text
    thread, _ = in_thread(one.layer_done_counter.wait_until, 0)
    assert blocked(thread)
    queue_load(one, 2)
    with pytest.raises(LoaderGone, match="stuck"):
        one.start_loading()
    with pytest.raises(LoaderGone, match="doesn't end"):
        one._init_load_enqueue_thread(True)

    monkeypatch.setattr(ours, "JOIN_TIMEOUT_S", 10.0)
    next_one, results = in_thread(one.start_loading)
    assert blocked(next_one)
    gate.set()
    assert ended(thread) and ended(next_one)
    assert results == [1]
    assert not one.async_load_enqueue
    assert [ack.node_ids for ack in one.ack_load_queue] == [[1], [2]]


@pytest.mark.parametrize("enabled", [True, False])
def test_turning_it_on_again_leaves_one_thread(controller, enabled):
    """Pinned: a second initialisation ends the first one's loader."""
    one = controller(True)
    first = one.load_enqueue_thread
    one._init_load_enqueue_thread(enabled)
    assert not first.is_alive()
    assert (one.load_enqueue_thread is not None) is enabled
    queue_load(one, 1)
    one.start_loading()
    drained(one)
    assert len(one.ack_load_queue) == 1
