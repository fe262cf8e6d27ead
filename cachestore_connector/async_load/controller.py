"""What ``HiCacheController`` gets: the split of ``start_loading``, and the loader thread.

Attributes, set by `HiCacheController._init_load_enqueue_thread`:

- ``async_load_enqueue``: bursts go to the loader. Written by the scheduler thread only.
- ``load_enqueue_queue``, ``load_enqueue_thread``: first in, first out, one consumer; None when off.
- ``load_enqueue_error``: the first error of a burst on the loader; None while all went well.
- ``_ack_load_lock`` guards appends to ``ack_load_queue`` together with ``_load_bursts_queued``, the
  bursts that were handed out and have no ack yet. Their sum is what inline would be the length of
  ``ack_load_queue``: the same on every rank, whatever the loader's progress there.

The host-to-device stream's order, the rotation of slots and the acks are all in the order in which
bursts were handed out, because one thread serves them from one queue.

A controller may have been built without ``__init__`` (tests do): what isn't there counts as off.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import weakref
from typing import Any

from sglang.srt.managers import cache_controller as sglang_controller

from .burst import BurstDoneEvent, LoadBurst
from .waiting import LoaderGone, wait_for

THREAD_NAME = "hicache-load-enqueue"
#: How long a stop waits for the bursts that are queued.
JOIN_TIMEOUT_S = 60.0


class HiCacheController:
    """Methods for SGLang's class of that name."""

    # -- scheduler thread --------------------------------------------------------------------------

    def _init_load_enqueue_thread(self, enabled: bool) -> None:
        """Turn the loader on or off; on the scheduler thread, whose device it will use.

        After the layer counter was made, which gets the handshake.
        """
        self.stop_load_enqueue_thread()
        if getattr(self, "load_enqueue_thread", None) is not None:
            raise LoaderGone("HiCache async load enqueue: the loader before this one doesn't end")
        self._load_enqueue_stopping = False
        self.async_load_enqueue = bool(enabled)
        self.load_enqueue_queue = None
        self.load_enqueue_thread = None
        self.load_enqueue_error = None
        self._ack_load_lock = threading.Lock()
        self._load_bursts_queued = 0
        self._load_acked = threading.Condition()
        if enabled:
            adopt_counter(self)
            self._load_enqueue_device = _current_device(self)
            self.load_enqueue_queue = queue.Queue()
            self.load_enqueue_thread = threading.Thread(
                target=self._load_enqueue_thread_func, name=THREAD_NAME, daemon=True
            )
            self.load_enqueue_thread.start()
            _stop_at_exit(self)
        sglang_controller.logger.info(
            "HiCache async load enqueue: %s (%s)",
            "enabled" if enabled else "disabled",
            type(self).__name__,
        )

    def start_loading(self) -> int:
        """Hand the queued load-backs out as one burst; its slot, or -1 if there are none.

        What stays on this thread with the loader on, and why: the slot (the rotation is this
        thread's), ``merge_ops`` (it concatenates tensors on the compute stream, so before
        ``start_event``), ``start_event`` and the fence (they mark what this thread has enqueued so
        far), and the allocator's event (it counts this thread's reservations as handed over).
        """
        if len(self.load_queue) == 0:
            return -1

        if getattr(self, "_load_enqueue_stopping", False) is True:
            # A stop gave up waiting. What is queued comes first, and the loader takes no more.
            self.stop_load_enqueue_thread()
            if self.load_enqueue_thread is not None:
                raise LoaderGone("HiCache async load enqueue: the loader was stopped, and is stuck")
        producer_id = self.layer_done_counter.update_producer()
        producer_event = self.layer_done_counter.events[producer_id]
        op = sglang_controller.CacheOperation.merge_ops(self.load_queue)
        self.load_queue.clear()
        if not _goes_to_loader(self, producer_event):
            self._enqueue_load_burst(
                op, producer_event, start_event_recorded=False, fence_event=None
            )
            return producer_id

        producer_event.start_event.record()
        fence_event = None
        if self.load_fence_stream is not None:
            fence_event = sglang_controller.device_module.Event()
            fence_event.record(self.load_fence_stream)
        producer_event.rearm()
        producer_event.loader = self.load_enqueue_thread
        producer_event.burst_done = BurstDoneEvent(self.load_enqueue_thread)
        self.mem_pool_device_allocator.set_hicache_transfer_done_event(
            (id(self), "load"), producer_event.burst_done
        )
        with self._ack_load_lock:
            self._load_bursts_queued += 1
        self.load_enqueue_queue.put(LoadBurst(op, producer_event, fence_event))
        return producer_id

    def outstanding_load_bursts(self) -> int:
        """Bursts that were handed out and not reaped: inline, the length of ``ack_load_queue``."""
        with self._ack_load_lock:
            return len(self.ack_load_queue) + self._load_bursts_queued

    def wait_load_acks(self, count: int) -> None:
        """Wait until ``count`` bursts that were handed out have their acks.

        Pipeline rank 0 says how many acks all ranks pop; this rank's loader may be behind. Inline,
        this rank would wait at the same point, for the events of those acks.
        """
        with self._load_acked:
            wait_for(
                self._load_acked,
                lambda: len(self.ack_load_queue) >= count,
                f"the acks of {count} bursts",
                self.load_enqueue_thread,
            )

    def check_load_burst(self, consumer_index: int) -> None:
        """Raise if a burst failed; first wait until the one in this slot has left the loader.

        After a forward, which has waited for the slot's layers, there is nothing left to wait for.
        """
        if consumer_index >= 0 and getattr(self, "async_load_enqueue", False) is True:
            self.layer_done_counter.events[consumer_index].wait_enqueue_done()
        error = getattr(self, "load_enqueue_error", None)
        if error is not None:
            raise RuntimeError(
                "HiCache async load enqueue: a load-back failed, and its KV is stale"
            ) from error

    def _drain_load_enqueue(self) -> None:
        """Wait until the loader has nothing queued and nothing running."""
        bursts = getattr(self, "load_enqueue_queue", None)
        if bursts is None:
            return
        with bursts.all_tasks_done:
            wait_for(
                bursts.all_tasks_done,
                lambda: not bursts.unfinished_tasks,
                "the queued bursts",
                self.load_enqueue_thread,
            )

    def stop_load_enqueue_thread(self) -> None:
        """Serve what is queued, end the loader, and enqueue inline from now on. Idempotent.

        A loader that doesn't end in `JOIN_TIMEOUT_S` is left as it is, and said to be: with the
        handshake dropped, forwards would go past layers that it has not enqueued. It takes no new
        bursts; the next one, or the next stop, waits for it again.
        """
        thread = getattr(self, "load_enqueue_thread", None)
        if thread is None:
            return
        if not self._load_enqueue_stopping:
            self._load_enqueue_stopping = True
            self.load_enqueue_queue.put(None)
        thread.join(JOIN_TIMEOUT_S)
        if not thread.is_alive() and not self.load_enqueue_queue.empty():
            # The loader died. With the handshake dropped, forwards would pass what it left.
            self._load_enqueue_thread_func()
        if thread.is_alive():
            sglang_controller.logger.error(
                "HiCache async load enqueue: the loader didn't end in %g s", JOIN_TIMEOUT_S
            )
            return
        self.async_load_enqueue = False
        self.load_enqueue_queue = None
        self.load_enqueue_thread = None
        self._load_enqueue_stopping = False
        release_counter(self)
        sglang_controller.logger.info(
            "HiCache async load enqueue: stopped (%s)", type(self).__name__
        )

    # -- either thread -----------------------------------------------------------------------------

    def _enqueue_load_burst(
        self, op: Any, producer_event: Any, start_event_recorded: bool, fence_event: Any
    ) -> None:
        """Move the indices, wait for the fence, submit the copies layer by layer, append the ack.

        Inline, on the scheduler thread: with ``start_event_recorded`` False. On the loader, with
        True: ``op.device_indices`` is written by the allocator on the compute stream, so it is read
        on the host-to-device stream, after ``start_event``; and what of forwards has to come first
        is ``fence_event``, not what has been enqueued since.
        """
        engine = self.l2_transfer_engine
        h2d_stream = engine.host_to_device_stream
        if start_event_recorded:
            with sglang_controller.device_module.stream(h2d_stream):
                producer_event.start_event.wait(h2d_stream)
                moved = self._move_op_indices(op)
                _keep_until_read([op, *(getattr(op, "pool_transfers", None) or ())], h2d_stream)
            if fence_event is not None:
                h2d_stream.wait_event(fence_event)
        else:
            moved = self._move_op_indices(op)
            producer_event.start_event.record()
            if self.load_fence_stream is not None:
                # in overlap scheduling, reclaimed pages might still be written by the forward
                # thread, therefore a fence is needed to prevent memory corruption
                h2d_stream.wait_stream(self.load_fence_stream)

        completion = engine.submit_host_to_device(
            self._l2_load_transfers(*moved),
            start_event=producer_event.start_event,
            on_layer_done=producer_event.complete,
            transfer_layer_id_max=self.transfer_layer_id_max,
        )

        if not (start_event_recorded and _resolve(producer_event, completion.finish_event)):
            self.mem_pool_device_allocator.set_hicache_transfer_done_event(
                (id(self), "load"), completion.finish_event
            )
        ack = sglang_controller.HiCacheAck(
            start_event=completion.start_event,
            finish_event=completion.finish_event,
            node_ids=op.node_ids,
            num_tokens=len(op.device_indices),
            timing_enabled=completion.timing_enabled,
            num_tokens_by_pool=self._num_tokens_by_pool(op),
            num_bytes=self._transfer_num_bytes(op),
        )
        if start_event_recorded:
            self._append_load_ack(ack)
        else:
            # Inline nobody else appends, and nothing of the loader's need be there.
            self.ack_load_queue.append(ack)

    # -- loader thread -----------------------------------------------------------------------------

    def _load_enqueue_thread_func(self) -> None:
        """Serve bursts until None comes. Each ends acked, and its slot free, come what may."""
        bursts = self.load_enqueue_queue
        bind_error = _bind(self._load_enqueue_device)
        while True:
            burst = bursts.get()
            if burst is None:
                bursts.task_done()
                return
            try:
                if bind_error is not None:
                    raise bind_error
                self._enqueue_load_burst(
                    burst.op,
                    burst.producer_event,
                    start_event_recorded=True,
                    fence_event=burst.fence_event,
                )
            except BaseException as error:
                self._abort_load_burst(burst.op, burst.producer_event, error)
            finally:
                burst.producer_event.mark_enqueue_done()
                bursts.task_done()
                burst = None  # its tensors aren't kept until the next one comes

    def _abort_load_burst(
        self, op: Any, producer_event: Any, error: BaseException | None = None
    ) -> None:
        """A burst failed: log it, latch it, release its forward, publish an ack of no tokens.

        ``error`` is the exception that is being handled, unless it is given.

        The ack has the node ids, since locks are released by it. The nodes' KV is stale; that no
        answer comes from it is `check_load_burst`'s business, before the forward's result is used.
        """
        error = error or sys.exc_info()[1] or RuntimeError("the burst was aborted")
        sglang_controller.logger.error(
            "HiCache async load enqueue: the burst of nodes %s failed", op.node_ids, exc_info=error
        )
        if getattr(self, "load_enqueue_error", None) is None:
            self.load_enqueue_error = error
        producer_event.burst_failed = True
        try:
            h2d_stream = self.l2_transfer_engine.host_to_device_stream
            with sglang_controller.device_module.stream(h2d_stream):
                for layer in range(len(producer_event.load_events)):
                    producer_event.complete(layer)
        except Exception:
            sglang_controller.logger.exception(
                "HiCache async load enqueue: the device takes no events any more"
            )
            producer_event.release_waiters()
        _resolve(producer_event, producer_event.finish_event)
        self._append_load_ack(
            sglang_controller.HiCacheAck(
                start_event=producer_event.start_event,
                finish_event=producer_event.finish_event,
                node_ids=op.node_ids,
            )
        )

    def _append_load_ack(self, ack: Any) -> None:
        """Publish an ack; the burst is counted in ``ack_load_queue`` from now on."""
        with getattr(self, "_ack_load_lock", None) or contextlib.nullcontext():
            self.ack_load_queue.append(ack)
            self._load_bursts_queued = max(0, getattr(self, "_load_bursts_queued", 0) - 1)
        acked = getattr(self, "_load_acked", None)
        if acked is not None:
            with acked:
                acked.notify_all()


def adopt_counter(controller: Any) -> None:
    """Give the controller's counter the handshake; one of another kind is left alone."""
    counter = getattr(controller, "layer_done_counter", None)
    if isinstance(counter, sglang_controller.LayerDoneCounter):
        counter.enable_async_handshake()


def release_counter(controller: Any) -> None:
    """Take the handshake away again."""
    counter = getattr(controller, "layer_done_counter", None)
    if isinstance(counter, sglang_controller.LayerDoneCounter):
        counter.disable_async_handshake()


def _goes_to_loader(controller: Any, producer_event: Any) -> bool:
    # `is True`: a mock's attribute is truthy. A mock of an event has the handshake.
    return (
        getattr(controller, "async_load_enqueue", False) is True
        and controller.load_enqueue_thread is not None
        and bool(getattr(producer_event, "async_enqueue", False))
    )


def _keep_until_read(transfers: list, stream: Any) -> None:
    """Indices are allocated on the compute stream: not to be reused before ``stream`` read them."""
    for transfer in transfers:
        indices = transfer.device_indices
        kind = getattr(getattr(indices, "device", None), "type", None)
        if kind in ("cuda", "xpu"):
            indices.record_stream(stream)


def _resolve(producer_event: Any, finish_event: Any) -> bool:
    """Tell the burst's event that the allocator has; False if it has none, or was told."""
    burst_done = getattr(producer_event, "burst_done", None)
    if not isinstance(burst_done, BurstDoneEvent):
        return False
    producer_event.burst_done = None
    burst_done.resolve(finish_event)
    return True


def _current_device(controller: Any) -> Any:
    current = getattr(sglang_controller.device_module, "current_device", None)
    return current() if current is not None else getattr(controller, "device", None)


def _bind(device: Any) -> BaseException | None:
    """Bind this thread to ``device``: a new thread's is the first one. What went wrong, or None."""
    bind = getattr(sglang_controller.device_module, "set_device", None)
    if bind is None or device is None:
        return None
    try:
        bind(device)
    except Exception as error:
        return error
    return None


def _stop_at_exit(controller: Any) -> None:
    """End the loader before the interpreter does; a controller that is gone needs nothing."""
    if getattr(controller, "_stops_at_exit", False) is True:
        return
    controller._stops_at_exit = True
    reference = weakref.ref(controller)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive.stop_load_enqueue_thread()

    atexit.register(stop)
