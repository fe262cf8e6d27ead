"""Bounded waits for the loader thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sglang.srt.managers import cache_controller as sglang_controller

#: Seconds between log lines of a wait that goes on.
LOG_INTERVAL_S = 30.0
#: A wait ends with an exception after so many seconds. A burst takes less than one; SGLang's own
#: watchdog ends a scheduler that makes no progress for five minutes.
LIMIT_S = 600.0
#: How soon a loader that is gone is noticed.
_SLICE_S = 0.5


class LoaderGone(RuntimeError):
    """The loader thread ended, or is stuck: what was waited for doesn't come."""


def wait_for(
    condition: threading.Condition,
    predicate: Callable[[], bool],
    what: str,
    loader: threading.Thread | None,
) -> None:
    """Wait until ``predicate()``, which the loader thread makes true and notifies ``condition`` of.

    Called with ``condition`` held. Logs every `LOG_INTERVAL_S`. Raises `LoaderGone` when ``loader``
    ended without making it true, or after `LIMIT_S`. With no loader known only time ends the wait.
    """
    began = time.monotonic()
    logged = 0
    while True:
        # In this order: what the loader did before it ended counts.
        gone = loader is not None and not loader.is_alive()
        if predicate():
            return
        waited = time.monotonic() - began
        if gone:
            raise LoaderGone(f"HiCache async load enqueue: no loader thread, waiting for {what}")
        if waited >= LIMIT_S:
            raise LoaderGone(f"HiCache async load enqueue: {waited:.0f} s, waiting for {what}")
        if waited >= (logged + 1) * LOG_INTERVAL_S:
            logged = int(waited / LOG_INTERVAL_S)
            sglang_controller.logger.warning(
                "HiCache async load enqueue: %.0f s, waiting for %s", waited, what
            )
        condition.wait(min(_SLICE_S, LOG_INTERVAL_S, LIMIT_S - waited))
