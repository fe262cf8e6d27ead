"""No request is answered from a burst that failed.

Inline, an exception in a load-back ends the scheduler. On the loader the forward that needs it may
be running, on other ranks too, so the loader only latches the error and lets the forward finish;
then the scheduler fails, before the forward's result is used. One rank can't drop the nodes or
abort the requests on its own: the ranks' trees would differ, and their collectives hang.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from .wrapping import is_wrapped, wrap

logger = logging.getLogger("cachestore")

_SCHEDULER = "sglang.srt.managers.scheduler"


def guard_scheduler() -> bool:
    """Hook the scheduler, if this process has one; whether bursts may go to a loader.

    The first controller that wants a loader asks, in the scheduler's process, where the scheduler's
    module is imported by then. A process without it answers no requests.
    """
    module = sys.modules.get(_SCHEDULER)
    if module is None:
        return True
    scheduler = module.Scheduler
    if is_wrapped(scheduler, "run_batch", run_batch):
        return True
    parameters = list(inspect.signature(scheduler.run_batch).parameters)
    if parameters[:2] != ["self", "batch"]:
        logger.error(
            "CacheStore: load-backs are enqueued inline: Scheduler.run_batch takes %s", parameters
        )
        return False
    wrap(scheduler, "run_batch", run_batch)
    return True


def run_batch(original: Callable, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler.run_batch``: when it returns, its burst has left the loader, unfailed."""
    result = original(self, batch, *args, **kwargs)
    controller = getattr(self.tree_cache, "cache_controller", None)
    check = getattr(controller, "check_load_burst", None)
    if check is not None:
        check(batch.hicache_consumer_index)
    return result
