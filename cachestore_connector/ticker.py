"""A thread that does one thing again and again until it is told to stop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Ticker:
    """Calls ``tick`` at once and then about every ``interval`` seconds, on a daemon thread.

    ``tick`` must not raise. In a forked child there is no such thread, and `stop` does nothing.
    """

    def __init__(self, tick: Callable[[], None], interval: float, name: str) -> None:
        self._tick = tick
        self._interval = interval
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._tick()
            if self._stopping.wait(self._interval):
                return

    def stop(self, timeout: float) -> bool:
        """End it, and wait up to ``timeout`` seconds; whether it has. No tick begins after."""
        # A child may have the event's lock held by the thread that it hasn't.
        if os.getpid() != self._pid:
            return True
        self._stopping.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()
