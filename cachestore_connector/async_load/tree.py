"""What ``UnifiedRadixCache`` has to know of bursts that are only on the loader.

Each function takes SGLang's own first (``original``), and runs on the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def loading_check(original: Callable, self: Any, finish_count: int | None = None) -> None:
    """Pop as many acks as the ranks agreed on, once this rank's loader has appended them.

    The count is pipeline rank 0's. Called without one, SGLang agrees on it inside; then, on a later
    pipeline rank, all bursts that were handed out are waited for: the count can't be higher.
    """
    controller = self.cache_controller
    if _is_on(controller):
        if finish_count is not None:
            controller.wait_load_acks(finish_count)
        elif self.pp_rank > 0:
            controller.wait_load_acks(controller.outstanding_load_bursts())
    return original(self, finish_count)


def is_load_back_event_done(original: Callable, self: Any, consumer_index: int) -> bool:
    """Not while the slot's burst is on the loader: its event is the previous rotation's.

    A counter with events of its own kind (FlexKV's) is left alone. A failed burst raises: who is
    told "done" goes on to use its KV.
    """
    controller = self.cache_controller
    if consumer_index >= 0 and controller is not None:
        event = controller.layer_done_counter.events[consumer_index]
        is_enqueue_done = getattr(event, "is_enqueue_done", None)
        if is_enqueue_done is not None:
            if not is_enqueue_done():
                return False
            if getattr(event, "burst_failed", False) is True:
                controller.check_load_burst(consumer_index)
    return original(self, consumer_index)


def has_free_load_back_slot(original: Callable, self: Any) -> bool:
    """Count what was handed out and not reaped, so that every rank agrees."""
    controller = self.cache_controller
    if not _is_on(controller):
        return original(self)
    return controller.outstanding_load_bursts() < controller.layer_done_counter.num_counters


def stop_first(original: Callable, self: Any) -> Any:
    """Before the host pools go, or the process: the loader uses both."""
    controller = getattr(self, "cache_controller", None)
    if _is_on(controller):
        controller.load_enqueue_closed = True
        controller.stop_load_enqueue_thread()
    return original(self)


def _is_on(controller: Any) -> bool:
    # `is True`: a mock's attribute is truthy.
    return getattr(controller, "async_load_enqueue", False) is True
