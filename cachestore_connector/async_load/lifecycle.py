"""When the loader starts and stops with its controller, and what waits for it.

Each function takes SGLang's own first (``original``), and runs on the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs

from .controller import adopt_counter
from .failed_bursts import guard_scheduler


def controller_init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """After ``HiCacheController.__init__``: the loader, as the environment says."""
    original(self, *args, **kwargs)
    enabled = envs.SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE.get() and guard_scheduler()
    self._init_load_enqueue_thread(enabled)


def hybrid_init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """After ``HybridCacheController.__init__``: it may have made a counter of its own."""
    try:
        original(self, *args, **kwargs)
    except BaseException:
        self.stop_load_enqueue_thread()
        raise
    if getattr(self, "async_load_enqueue", False) is True:
        adopt_counter(self)


def reset(original: Callable, self: Any) -> None:
    """Drain first: nothing that the loader appends may come after the queues are cleared."""
    self._drain_load_enqueue()
    original(self)


def has_inflight_device_transfers(original: Callable, self: Any) -> bool:
    """A burst that is only on the loader uses device rows too: pages must not move."""
    if original(self):
        return True
    return getattr(self, "async_load_enqueue", False) is True and self.outstanding_load_bursts() > 0


def detach_storage_backend(original: Callable, self: Any) -> Any:
    """Detach with the loader stopped. It starts again: load-backs from host memory go on."""
    was_on = getattr(self, "async_load_enqueue", False) is True
    self.stop_load_enqueue_thread()
    try:
        return original(self)
    finally:
        stopped = self.load_enqueue_thread is None
        if was_on and stopped and not getattr(self, "load_enqueue_closed", False):
            self._init_load_enqueue_thread(True)
