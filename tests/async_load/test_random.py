"""Many bursts at random, on a fake device with virtual time."""

import random
import threading

import pytest

from async_load.controllers import TIMEOUT, ended, in_thread, queue_load

BURSTS = 120


class Run:
    """A scheduler that loads, runs forwards, reaps, resets and stops, at random.

    It keeps SGLang's rules: a forward waits for each layer of its burst, at most two forwards are
    out, a slot is reused when its forward has ended.
    """

    def __init__(self, controller, device, seed):
        self.draw = random.Random(seed)
        self.device = device
        self.layers = self.draw.randint(1, 12)
        self.one = controller(True, layers=self.layers)
        self.pool = self.one.mem_pool_host
        self.pool.seconds = self.draw.choice([0.0, 0.5, 3.0])
        self.gates = []
        self.failed, self.expected, self.reaped = set(), [], []
        self.threads = []

    def hand_out(self, node):
        draw, one = self.draw, self.one
        if draw.random() < 0.2:
            self.pool.failures[node, draw.randrange(self.layers)] = ValueError(str(node))
            self.failed.add(node)
        if draw.random() < 0.5:
            _, gate = self.pool.hold(node, draw.randrange(self.layers))
            # Somebody lets it go on, at some time, whatever the scheduler does.
            timer = threading.Timer(draw.random() * 0.01, gate.set)
            self.threads.append(timer)
            timer.start()
        queue_load(one, node, tokens=draw.randint(1, 4))
        if draw.random() < 0.3:
            one.load_fence_stream = draw.choice([None, self.device.default])
        slot = one.start_loading()
        assert one.has_inflight_device_transfers()
        self.expected.append(node)
        return slot

    def forward(self, node, slot):
        """Wait for each layer; without a failure, its copy was enqueued and comes before."""
        counter = self.one.layer_done_counter
        counter.set_consumer(slot)
        for layer in range(self.layers):
            counter.wait_until(layer)
            if node not in self.failed:
                place = self.pool.copied[node][layer]
                assert self.device.default.comes_after(place), (node, layer)
            self.device.default.operate(0.1)

    def reap(self, at_least=0):
        """As `loading_check` does with a count that the ranks agreed on."""
        one = self.one
        outstanding = one.outstanding_load_bursts()
        count = self.draw.randint(min(at_least, outstanding), outstanding)
        if one.async_load_enqueue:
            one.wait_load_acks(count)
        for _ in range(count):
            ack = one.ack_load_queue.pop(0)
            ack.finish_event.synchronize()
            assert (ack.num_tokens == 0) == (ack.node_ids[0] in self.failed)
            self.reaped.append(ack.node_ids[0])

    def flush(self):
        """Idle first, as SGLang is when it resets; what wasn't reaped is gone for good."""
        self.one.reset()
        assert self.one.ack_load_queue == []
        assert self.one.outstanding_load_bursts() == 0
        self.expected = list(self.reaped)

    def run(self, node, slot):
        if self.draw.random() < 0.9:
            self.forward(node, slot)
            self.device.now = max(self.device.now, self.device.default.time)
        else:  # a decode instance asks instead of running a forward
            event = self.one.layer_done_counter.events[slot]
            event.wait_enqueue_done()
            event.finish_event.synchronize()

    def steps(self):
        waiting = []  # bursts whose forward comes later
        stop_at = self.draw.choice([None, self.draw.randrange(BURSTS)])
        for node in range(1000, 1000 + 10 * BURSTS, 10):
            waiting.append((node, self.hand_out(node)))
            while waiting and (len(waiting) > 2 or self.draw.random() < 0.6):
                self.run(*waiting.pop(0))
            self.reap()
            if not waiting and self.draw.random() < 0.1:
                self.flush()
            if (node - 1000) // 10 == stop_at:
                if len(waiting) < 2 and self.draw.random() < 0.5:
                    waiting.append((node + 5, self.hand_out(node + 5)))  # still queued
                self.one.stop_load_enqueue_thread()
                assert self.one.load_enqueue_thread is None
                self.pool.failures.clear()
                break
        for burst in waiting:
            self.run(*burst)
        self.reap(at_least=BURSTS)
        assert self.reaped == self.expected
        assert not self.one.has_inflight_device_transfers()
        assert (self.one.load_enqueue_error is not None) == bool(self.failed)


@pytest.mark.parametrize("seed", range(25))
def test_at_random(controller, device, seed):
    """Pinned: no consumer passes a layer whose copy wasn't enqueued; none hangs; acks are in order.

    None is lost but by a reset, and none comes after it.
    """
    run = Run(controller, device, seed)
    thread, results = in_thread(run.steps)
    thread.join(TIMEOUT * 3)
    assert ended(thread), "somebody hangs"
    assert results == [None], results
    for timer in run.threads:
        timer.join()
