"""A log line per kind of trouble and interval, with how many were left out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class Throttle:
    """Logs the first of each kind at once, then at most one per ``interval`` seconds.

    What is left out is counted, and said with the next of its kind, or by `tell_left_out`.
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
        self._due: dict[str, float] = {}  # by kind: when the next one may be logged
        self._left_out: dict[str, tuple[int, int, str]] = {}  # how many since; the last one

    def log(self, level: int, kind: str, message: str, *, traceback: bool = False) -> None:
        """Log ``message``, unless one of its ``kind`` was logged within the interval."""
        now = self._clock()
        with self._lock:
            left_out, *_ = self._left_out.pop(kind, (0,))
            if now < self._due.get(kind, now):
                self._left_out[kind] = (left_out + 1, level, message)
                return
            self._due[kind] = now + self._interval
        if left_out:
            message += f" (and {left_out} more like it)"
        # SGLang prints neither the level nor the name of the logger.
        self._logger.log(level, "CacheStore: %s", message, exc_info=traceback)

    def tell_left_out(self) -> None:
        """Log the last one of each kind of which some were left out, and how many."""
        with self._lock:
            kinds, self._left_out = list(self._left_out.values()), {}
        for count, level, message in kinds:
            self._logger.log(
                level, "CacheStore: %s (%d like it, this the last, weren't logged)", message, count
            )
