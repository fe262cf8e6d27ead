"""A log line per kind of trouble and interval, with how many were left out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class Throttle:
    """Logs the first of each kind at once, then at most one per ``interval`` seconds.

    Thread-safe. Kinds are few and fixed (call sites name them), so memory is bounded.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> (next time, left out since)

    def log(self, level: int, kind: str, message: str, *, traceback: bool = False) -> None:
        """Log ``message``, unless one of its ``kind`` was logged within the interval."""
        now = self._clock()
        with self._lock:
            due, left_out = self._kinds.get(kind, (now, 0))
            if now < due:
                self._kinds[kind] = (due, left_out + 1)
                return
            self._kinds[kind] = (now + self._interval, 0)
        if left_out:
            message += f" (and {left_out} more like it)"
        # SGLang prints neither the level nor the name of the logger.
        self._logger.log(level, "CacheStore: %s", message, exc_info=traceback)
