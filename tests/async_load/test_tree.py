"""What the radix tree, the allocator and other ranks see of a burst that is only on the loader."""

import types

import pytest

from async_load.controllers import blocked, ended, in_thread, queue_load


def held(one, burst=1, layer=0):
    """Hand a burst out that the loader holds; (slot, gate)."""
    reached, gate = one.mem_pool_host.hold(burst, layer)
    queue_load(one, burst)
    slot = one.start_loading()
    assert reached.wait(10)
    return slot, gate


def test_not_done_while_queued(controller, tree):
    """Pinned: the slot's event is the previous rotation's, and says done; the tree says no."""
    one = controller(True)
    one.mem_pool_host.seconds = 0.0
    this = tree(one)
    slot, gate = held(one)
    queue_load(one, 2)
    second = one.start_loading()
    for each in (slot, second):
        assert one.layer_done_counter.events[each].finish_event.query()
        assert not this.is_load_back_event_done(each)
    assert this.is_load_back_event_done(-1)
    gate.set()
    one._drain_load_enqueue()
    assert this.is_load_back_event_done(slot)
    assert this.is_load_back_event_done(second)


def test_done_only_when_the_device_is(controller, device, tree):
    """Pinned: enqueued is not done."""
    one = controller(True)
    queue_load(one, 1)
    slot = one.start_loading()
    one._drain_load_enqueue()
    assert not tree(one).is_load_back_event_done(slot)
    device.now = 3.0
    assert tree(one).is_load_back_event_done(slot)


def test_a_failed_burst_is_not_done_but_an_error(controller, tree):
    """Pinned: a disaggregated decode, told "done", would use the KV with no batch of its own."""
    one = controller(True)
    one.mem_pool_host.failures[1, 1] = ValueError("no descriptor")
    queue_load(one, 1)
    slot = one.start_loading()
    one._drain_load_enqueue()
    with pytest.raises(RuntimeError, match="stale"):
        tree(one).is_load_back_event_done(slot)


def test_another_kind_of_counter_is_left_alone(controller, tree, hooked):
    """Pinned: FlexKV's events have no flag; the tree asks them what it asked before."""
    one = controller(False)
    event = types.SimpleNamespace(finish_event=types.SimpleNamespace(query=lambda: "theirs"))
    one.layer_done_counter = types.SimpleNamespace(events=[event])
    assert tree(one).is_load_back_event_done(0) == "theirs"
    one._init_load_enqueue_thread(True)
    assert tree(one).is_load_back_event_done(0) == "theirs"


def test_slots_are_counted_from_hand_over_to_reaping(controller, device, tree):
    """Pinned: the same on every rank, whatever its loader has done so far."""
    fast, slow = controller(True), controller(True)
    gate = None
    for one in (fast, slow):
        one.mem_pool_host.seconds = 0.0
        for node in (1, 2, 3):
            assert tree(one).has_free_load_back_slot()
            if one is slow and node == 1:
                _, gate = held(one)
                continue
            queue_load(one, node)
            one.start_loading()
    fast._drain_load_enqueue()
    assert (len(fast.ack_load_queue), len(slow.ack_load_queue)) == (3, 0)
    for one in (fast, slow):
        assert not tree(one).has_free_load_back_slot()
        assert one.outstanding_load_bursts() == 3
    gate.set()
    for one in (fast, slow):
        this = tree(one)
        this.loading_check(finish_count=1)
        assert this.buffer_pipeline.finished == [1]
        assert this.has_free_load_back_slot()
        assert one.outstanding_load_bursts() == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_pages_do_not_move_while_a_burst_is_out(controller, tree, enabled):
    """Pinned: the gate of compaction is shut from `load` until the ack is reaped, on and off."""
    one = controller(enabled)
    assert not one.has_inflight_device_transfers()
    if enabled:
        _, gate = held(one)
        assert one.ack_load_queue == one.load_queue == []
        assert one.has_inflight_device_transfers()
        gate.set()
        one._drain_load_enqueue()
    else:
        queue_load(one, 1)
        one.start_loading()
    assert one.has_inflight_device_transfers()
    tree(one).loading_check(finish_count=1)
    assert not one.has_inflight_device_transfers()


@pytest.mark.parametrize("enabled", [True, False])
def test_locks_are_given_back_after_the_copy(controller, device, tree, enabled):
    """Pinned (F30): the host page and the device page stay locked until the device has copied."""
    one = controller(enabled)
    queue_load(one, 1)
    one.start_loading()
    one._drain_load_enqueue()
    core = types.SimpleNamespace(write_back_duplicate_reclaim_digest=0)
    this = tree(one, tree_core=core, _all_reduce=lambda tensor, op: None)
    this.loading_check()
    assert this.buffer_pipeline.finished == []
    device.now = 2.9  # three layers of a second each
    this.loading_check()
    assert this.buffer_pipeline.finished == []
    device.now = 3.0
    this.loading_check()
    assert this.buffer_pipeline.finished == [1]


def test_a_rank_that_lags_waits_for_its_own_ack(controller, tree):
    """Pinned: rank 0 says two, and this rank's loader has none yet: no empty list is popped."""
    one = controller(True)
    _, gate = held(one)
    queue_load(one, 2)
    one.start_loading()
    this = tree(one, pp_rank=1)
    thread, results = in_thread(this.loading_check, 2)
    assert blocked(thread)
    gate.set()
    assert ended(thread)
    assert results == [None]
    assert this.buffer_pipeline.finished == [1, 2]


def test_a_rank_that_agrees_inside_waits_too(controller, tree):
    """Pinned: called without a count, a later pipeline rank waits before it takes rank 0's."""
    one = controller(True)
    _, gate = held(one)
    rank0 = []

    def receive(tensor, op):
        rank0.append(len(one.ack_load_queue))
        tensor[0] = 1

    core = types.SimpleNamespace(write_back_duplicate_reclaim_digest=0)
    this = tree(one, pp_rank=1, tree_core=core, _all_reduce=receive)
    thread, results = in_thread(this.loading_check)
    assert blocked(thread)
    gate.set()
    assert ended(thread)
    assert results == [None]
    assert rank0 == [1]
    assert this.buffer_pipeline.finished == [1]


def test_rank_0_does_not_wait(controller, tree):
    """Pinned: a queued burst isn't ready, so the count is 0, and the scheduler goes on."""
    one = controller(True)
    _, gate = held(one)
    this = tree(one, _all_reduce=lambda tensor, op: None)
    this.tree_core = types.SimpleNamespace(write_back_duplicate_reclaim_digest=0)
    this.loading_check()
    assert this.buffer_pipeline.finished == []
    gate.set()


def test_the_allocators_event_is_not_done_before_the_burst(controller, device):
    """Pinned: given on the scheduler thread, per burst; who waits for it waits for the copies."""
    one = controller(True, layers=2)
    _, gate = held(one)
    (event,) = one.mem_pool_device_allocator.done_events
    device.now = 1000.0
    assert not event.query()
    compute = device.default
    thread, _ = in_thread(event.wait, compute)  # as torch's wait_event does
    assert blocked(thread)
    gate.set()
    assert ended(thread)
    copies = one.mem_pool_host.copied[1]
    assert all(compute.comes_after(copies[layer]) for layer in range(2))
    one._drain_load_enqueue()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert len(one.mem_pool_device_allocator.done_events) == 1


def test_torch_streams_take_it(hooked):
    """Pinned: SGLang's allocator calls ``Stream.wait_event``, which asks the event, duck-typed."""
    import inspect

    import torch

    assert "event.wait(self)" in inspect.getsource(torch.cuda.Stream.wait_event)


def test_the_next_bursts_reservations_are_not_wiped(controller):
    """Pinned: SGLang's allocator counts pages reserved for loads until "the" load is handed over.

    Told so by the loader, later, it would forget the pages of the burst that is being put together.
    """
    from sglang.srt.mem_cache.allocator.unified_sub_pool import MultiEndedAllocator

    one = controller(True)
    allocator = types.SimpleNamespace(
        _hicache_transfer_done_events={}, _pending_hicache_load_pages=0
    )
    told = MultiEndedAllocator.set_hicache_transfer_done_event
    allocator.set_hicache_transfer_done_event = lambda *args: told(allocator, *args)
    one.mem_pool_device_allocator = allocator

    allocator._pending_hicache_load_pages += 2
    _, gate = held(one)
    assert allocator._pending_hicache_load_pages == 0
    first = allocator._hicache_transfer_done_events[id(one), "load"]
    allocator._pending_hicache_load_pages += 5  # the next burst's
    gate.set()
    one._drain_load_enqueue()
    assert allocator._pending_hicache_load_pages == 5
    queue_load(one, 2)
    one.start_loading()
    assert allocator._pending_hicache_load_pages == 0
    assert allocator._hicache_transfer_done_events[id(one), "load"] is not first
