"""A burst that fails on the loader: nobody hangs, everybody can know, and no answer comes of it."""

import logging
import types

import pytest

from async_load.controllers import ended, in_thread, queue_load
from cachestore_connector.async_load import failed_bursts


def fail(one, burst=1, layer=1):
    """A burst that fails at a layer; returns its slot."""
    one.mem_pool_host.failures[burst, layer] = ValueError("no descriptor")
    queue_load(one, burst)
    return one.start_loading()


def test_logged_released_acked_and_the_next_is_served(controller, device, caplog):
    """Pinned: the log names the nodes, the error is latched, locks are given back by a zero ack."""
    one = controller(True)
    with caplog.at_level(logging.ERROR, "sglang.srt.managers.cache_controller"):
        one.layer_done_counter.set_consumer(fail(one))
        thread, results = in_thread(one.layer_done_counter.wait_until, 2)
        assert ended(thread)
        assert results == [None]
        one._drain_load_enqueue()
    (record,) = caplog.records
    assert "nodes [1]" in record.message
    assert "no descriptor" in str(record.exc_info[1])
    assert str(one.load_enqueue_error) == "no descriptor"
    (ack,) = one.ack_load_queue
    slot = one.layer_done_counter.events[0]
    assert ack.node_ids == [1]
    assert (ack.num_tokens, ack.num_bytes, ack.timing_enabled) == (0, 0, False)
    assert not ack.num_tokens_by_pool
    assert ack.finish_event is slot.finish_event
    # Every layer, on the stream of the copies.
    for event in slot.load_events:
        assert ("record", event.name, "h2d") in device.calls()
    assert slot.burst_failed
    assert slot.is_enqueue_done()

    queue_load(one, 2)
    slot = one.start_loading()
    one.layer_done_counter.set_consumer(slot)
    for layer in range(3):
        one.layer_done_counter.wait_until(layer)
        assert device.default.comes_after(one.mem_pool_host.copied[2][layer])
    one._drain_load_enqueue()
    assert not one.layer_done_counter.events[slot].burst_failed
    assert one.ack_load_queue[1].num_tokens == 3
    assert str(one.load_enqueue_error) == "no descriptor"  # the first one stays


@pytest.mark.parametrize("what", ["_move_op_indices", "_l2_load_transfers", "_num_tokens_by_pool"])
def test_wherever_it_fails(controller, what):
    """Pinned: before the first layer, and after the last one, it is the same."""
    one = controller(True)

    def broken(*_):
        raise RuntimeError(what)

    setattr(one, what, broken)
    queue_load(one, 1)
    one.layer_done_counter.set_consumer(one.start_loading())
    one.layer_done_counter.wait_until(2)
    one._drain_load_enqueue()
    (ack,) = one.ack_load_queue
    assert (ack.node_ids, ack.num_tokens) == ([1], 0)
    assert str(one.load_enqueue_error) == what


def test_a_device_that_takes_no_events(controller, device, caplog):
    """Pinned: with the device broken for good, waiters are released by the flags alone."""
    one = controller(True)
    real = one._move_op_indices

    def broken(op):
        device.record_error = RuntimeError("an illegal memory access was encountered")
        return real(op)

    one._move_op_indices = broken
    queue_load(one, 1)
    one.layer_done_counter.set_consumer(one.start_loading())
    one.layer_done_counter.wait_until(2)
    one._drain_load_enqueue()
    device.record_error = None
    assert "takes no events" in caplog.text
    assert len(one.ack_load_queue) == 1
    with pytest.raises(RuntimeError, match="stale"):
        one.check_load_burst(0)


def scheduler(one, forward):
    """As much of a scheduler as `run_batch` uses: its forward, its tree."""
    tree = types.SimpleNamespace(cache_controller=one)
    return types.SimpleNamespace(tree_cache=tree), lambda self, batch: forward(batch)


def batch(slot):
    return types.SimpleNamespace(hicache_consumer_index=slot)


def test_no_result_of_a_failed_burst_is_used(controller):
    """Pinned: the forward ends, on this rank too, and then the scheduler fails as inline."""
    one = controller(True)
    ran = []

    def forward(batch):
        one.layer_done_counter.set_consumer(batch.hicache_consumer_index)
        for layer in range(3):
            one.layer_done_counter.wait_until(layer)
        ran.append(batch)
        return "answer"

    this, original = scheduler(one, forward)
    queue_load(one, 5)
    assert failed_bursts.run_batch(original, this, batch(one.start_loading())) == "answer"
    with pytest.raises(RuntimeError, match="stale") as raised:
        failed_bursts.run_batch(original, this, batch(fail(one)))
    assert str(raised.value.__cause__) == "no descriptor"
    assert len(ran) == 2
    with pytest.raises(RuntimeError, match="stale"):  # a later batch may have matched the nodes
        failed_bursts.run_batch(original, this, batch(-1))


def test_a_forward_that_waits_for_no_layer_is_held_to_it(controller):
    """Pinned: when a batch has run, its burst has left the loader, and a failure is known."""
    one = controller(True)
    this, original = scheduler(one, lambda batch: "answer")
    reached, gate = one.mem_pool_host.hold(1, 1)
    thread, results = in_thread(failed_bursts.run_batch, original, this, batch(fail(one)))
    assert reached.wait(10)
    assert results == []
    gate.set()
    assert ended(thread)
    assert "stale" in str(results[0])


def test_trees_without_our_controller_pass(hooked):
    """Pinned: a tree without a controller, or with another's, runs as it did."""
    for tree in (object(), types.SimpleNamespace(cache_controller=None)):
        this = types.SimpleNamespace(tree_cache=tree)
        assert failed_bursts.run_batch(lambda self, batch: 7, this, batch(-1)) == 7


def test_the_allocators_event_of_a_failed_burst_ends(controller):
    """Pinned: who waits for it isn't left waiting."""
    one = controller(True)
    fail(one)
    (event,) = one.mem_pool_device_allocator.done_events
    event.synchronize()
    assert event.query()
