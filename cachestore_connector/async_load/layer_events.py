"""A slot's events, one a layer, and the rotation of slots: with a handshake on the CPU.

Waiting for a device event that was never recorded is a no-op. Inline that can't happen: a burst is
enqueued before the forward that waits for it is. On the loader it can, so each layer has a flag on
the CPU that says "recorded", and each slot one that says "this burst is enqueued, and acked".
"""

from __future__ import annotations

import threading
from typing import Any

from sglang.srt.managers import cache_controller as sglang_controller

from .waiting import wait_for


class LayerLoadingEvent:
    """One slot of the rotation: the events of the burst that has it.

    Written by the loader thread: ``complete``, ``mark_enqueue_done``, ``burst_failed``. By the
    scheduler thread: ``rearm``, when it hands a burst out, and nobody else waits on the slot then:
    consumers run on the scheduler thread too, and `LayerDoneCounter.update_producer` has waited for
    the loader. Invariants, with the handshake on:

    - ``_recorded[i]``: the event of layer i was recorded for the burst that the slot has now, after
      that layer's copies were enqueued, or the burst failed. False from ``rearm`` to
      ``complete(i)``.
    - ``_enqueue_done``: no burst of this slot is queued on the loader or running there, and the
      last one's ack is in ``ack_load_queue``. Until then the finish event may be the previous
      rotation's, and ``query()`` would say "done".
    - ``burst_failed``: set before any flag that the failed burst's release sets, so whoever sees
      the flag sees the failure.

    All flags change under ``_changed``. Without the handshake this is SGLang's class.
    """

    def __init__(self, num_layers: int, async_enqueue: bool = False):
        device_module = sglang_controller.device_module
        self._num_layers = num_layers
        self.load_events = [device_module.Event() for _ in range(num_layers)]
        self.start_event = device_module.Event()  # start event on controller stream
        self.async_enqueue = async_enqueue
        self.loader: threading.Thread | None = None  # who completes the burst
        self.burst_failed = False
        self.burst_done: Any = None  # what the allocator waits for
        self._changed = threading.Condition()
        self._recorded = [False] * num_layers
        self._enqueue_done = True

    def complete(self, layer_index: int) -> None:
        """Record the layer's event on the current stream; then, and not before, release waiters."""
        assert 0 <= layer_index < self._num_layers
        self.load_events[layer_index].record()
        if self.async_enqueue:
            with self._changed:
                self._recorded[layer_index] = True
                self._changed.notify_all()

    def wait(self, layer_index: int) -> None:
        """Let the current stream wait for the layer, first the CPU for its event to be recorded."""
        if self.async_enqueue and not self._recorded[layer_index]:
            with self._changed:
                wait_for(
                    self._changed,
                    lambda: self._recorded[layer_index] or not self.async_enqueue,
                    f"layer {layer_index} of {self._num_layers} to be enqueued",
                    self.loader,
                )
        sglang_controller.device_module.current_stream().wait_event(self.load_events[layer_index])

    def rearm(self) -> None:
        """Take the slot for a new burst: nothing of it is recorded or enqueued yet."""
        if not self.async_enqueue:
            return
        with self._changed:
            self._recorded = [False] * self._num_layers
            self._enqueue_done = False
            self.burst_failed = False

    def is_enqueue_done(self) -> bool:
        """Whether the slot's burst has left the loader; without the handshake always."""
        return self._enqueue_done or not self.async_enqueue

    def mark_enqueue_done(self) -> None:
        """The slot's burst is enqueued and acked."""
        with self._changed:
            self._enqueue_done = True
            self._changed.notify_all()

    def wait_enqueue_done(self) -> None:
        """Wait until `is_enqueue_done`."""
        if self.is_enqueue_done():
            return
        with self._changed:
            wait_for(self._changed, self.is_enqueue_done, "a burst to be enqueued", self.loader)

    def release_waiters(self) -> None:
        """Set every layer's flag, recorded or not: the last way to release a failed burst."""
        with self._changed:
            self._recorded = [True] * self._num_layers
            self._changed.notify_all()

    def enable_async_handshake(self) -> None:
        """From now on wait for flags; a slot that isn't armed has nothing to wait for."""
        with self._changed:
            if not self.async_enqueue:
                self._recorded = [True] * self._num_layers
                self.async_enqueue = True

    def disable_async_handshake(self) -> None:
        """Bursts are enqueued inline from now on: flags mean nothing, whoever waits goes on."""
        with self._changed:
            self.async_enqueue = False
            self._enqueue_done = True
            self._changed.notify_all()


class LayerDoneCounter:
    """The rotation of slots; scheduler thread only."""

    def __init__(self, num_layers: int, async_enqueue: bool = False):
        event_class = sglang_controller.LayerLoadingEvent
        self.num_layers = num_layers
        # extra producer and consumer counters for overlap mode
        self.num_counters = 3
        self.async_enqueue = async_enqueue
        self.events = [event_class(num_layers, async_enqueue) for _ in range(self.num_counters)]
        self.producer_index = -1
        self.consumer_index = -1

    def update_producer(self) -> int:
        """Hand out the next slot, once the loader has left it.

        While a burst is queued its slot's finish event is the previous rotation's, and ``query()``
        would pass: so first the flag, then the event.
        """
        self.producer_index = (self.producer_index + 1) % self.num_counters
        event = self.events[self.producer_index]
        if self.async_enqueue:
            event.wait_enqueue_done()
        assert event.finish_event.query(), (
            "Producer finish event should be ready before being reused."
        )
        return self.producer_index

    def enable_async_handshake(self) -> None:
        """Turn the handshake on, for a counter that was built without it."""
        self.async_enqueue = True
        for event in self.events:
            event.enable_async_handshake()

    def disable_async_handshake(self) -> None:
        """Turn the handshake off; see `LayerLoadingEvent.disable_async_handshake`."""
        self.async_enqueue = False
        for event in self.events:
            event.disable_async_handshake()
