"""The loader's parts, called one by one, on controllers and slots that have only what those use."""

import threading
import types
from unittest import mock

import pytest
import torch

from async_load.controllers import in_thread, queue_load


def operation(module, node=7):
    return module.CacheOperation(torch.arange(2), torch.arange(2), node_id=node)


@pytest.mark.parametrize("lock", [True, False])
def test_an_ack_on_a_bare_controller(hooked, lock):
    """Pinned: appended, under the lock where there is one, with nothing else set."""
    one = object.__new__(hooked.HiCacheController)
    one.ack_load_queue = []
    if lock:
        one._ack_load_lock = mock.MagicMock()
    one._append_load_ack("ack")
    assert one.ack_load_queue == ["ack"]
    if lock:
        assert one._ack_load_lock.__enter__.call_count == 1


@pytest.mark.parametrize("slot", ["slot", "mock", "namespace"])
def test_the_loaders_half_called_directly(controller, device, slot):
    """Pinned: without a hand-out nobody told the allocator, so it is told the finish event."""
    from sglang.srt.managers import cache_controller as module

    one = controller(True)
    event = {
        "slot": lambda: module.LayerLoadingEvent(3, async_enqueue=True),
        "mock": mock.MagicMock,
        "namespace": lambda: types.SimpleNamespace(
            start_event=device.Event(), complete=lambda layer: None
        ),
    }[slot]()
    op = operation(module)
    del op.pool_transfers  # the base controller has no use for them
    one._enqueue_load_burst(op, event, start_event_recorded=True, fence_event=device.Event())
    (ack,) = one.ack_load_queue
    assert one.mem_pool_device_allocator.done_events == [ack.finish_event]


def test_after_a_hand_out_the_allocator_is_not_told_again(controller):
    """Pinned: a late call from the loader would wipe the next burst's reservations."""
    one = controller(True)
    queue_load(one, 1)
    slot = one.start_loading()
    one._drain_load_enqueue()
    assert len(one.mem_pool_device_allocator.done_events) == 1
    assert one.layer_done_counter.events[slot].burst_done is None


@pytest.mark.parametrize("given", ["error", "handled", "none"])
def test_an_abort_called_directly(hooked, controller, given):
    """Pinned: the error is the one that is given, or handled; there always is one."""
    one = controller(False)
    event = hooked.LayerLoadingEvent(3, async_enqueue=True)
    event.rearm()
    if given == "none":
        one._abort_load_burst(operation(hooked), event)
    else:
        try:
            raise ValueError("no descriptor")
        except ValueError as error:
            one._abort_load_burst(operation(hooked), event, *[error][: given == "error"])
    thread, results = in_thread(event.wait, 2)
    thread.join(10)
    assert results == [None]
    (ack,) = one.ack_load_queue
    assert (ack.node_ids, ack.num_tokens) == ([7], 0)
    assert ("aborted" if given == "none" else "no descriptor") in str(one.load_enqueue_error)


def test_the_loader_passes_by_name(controller):
    """Pinned: whatever stands for the burst's half gets its arguments by their names."""
    one = controller(True)
    seen = []

    def half(op, producer_event, *, start_event_recorded, fence_event):
        seen.append((start_event_recorded, fence_event, threading.current_thread().name))

    one._enqueue_load_burst = half
    queue_load(one, 1)
    one.start_loading()
    one._drain_load_enqueue()
    assert seen == [(True, None, "hicache-load-enqueue")]


def test_a_mock_of_a_slot_goes_to_the_loader(controller):
    """Pinned: it is armed, and marked done."""
    one = controller(True)
    event = mock.MagicMock()
    one.layer_done_counter = mock.MagicMock(events=[event])
    one.layer_done_counter.update_producer.return_value = 0
    seen = []
    one._enqueue_load_burst = lambda *_, **__: seen.append(threading.current_thread().name)
    queue_load(one, 1)
    assert one.start_loading() == 0
    one._drain_load_enqueue()
    assert seen == ["hicache-load-enqueue"]
    event.rearm.assert_called_once_with()
    event.mark_enqueue_done.assert_called_once_with()


@pytest.mark.parametrize("kind", [mock.MagicMock, types.SimpleNamespace])
def test_the_done_guard_needs_is_enqueue_done_only(tree, kind):
    """Pinned: an event that has it is asked, and nothing else of ours."""
    done = []
    event = kind(is_enqueue_done=lambda: bool(done))
    event.finish_event = types.SimpleNamespace(query=lambda: True)
    counter = types.SimpleNamespace(events=[event])
    this = tree(types.SimpleNamespace(layer_done_counter=counter))
    assert this.is_load_back_event_done(0) is False
    done.append(True)
    assert this.is_load_back_event_done(0) is True


def test_a_stop_serves_what_a_dead_loader_left(controller):
    """Pinned: the handshake isn't dropped over bursts that nobody enqueued."""
    one = controller(True)
    one.load_enqueue_queue.put(None)
    one.load_enqueue_thread.join(10)
    for node in (1, 2):
        queue_load(one, node)
        one.start_loading()
    assert one.ack_load_queue == []
    one.stop_load_enqueue_thread()
    assert one.load_enqueue_thread is None
    assert [ack.node_ids for ack in one.ack_load_queue] == [[1], [2]]
    assert sorted(one.mem_pool_host.copied[2]) == [0, 1, 2]
    assert one.outstanding_load_bursts() == 2


def test_lines_go_to_sglangs_logger(controller, hooked, monkeypatch):
    """Pinned: to the one that its module has when they are written."""
    logger = mock.MagicMock()
    monkeypatch.setattr(hooked, "logger", logger)
    controller(True)
    (call,) = logger.info.call_args_list
    assert call.args[0] % call.args[1:] == (
        "HiCache async load enqueue: enabled (HiCacheController)"
    )
