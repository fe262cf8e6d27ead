"""What SGLang's storage metrics want to know about each batch, until they ask."""

from __future__ import annotations

import threading
from collections import deque

# SGLang asks at every scheduler step; this is for when it stops asking.
_MOST = 4096


class TransferLog:
    """Pages and GB/s of each batch since the last `drain`. Bounded; thread-safe."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._batches: deque[tuple[bool, int, float]] = deque(maxlen=_MOST)

    def add(self, is_load: bool, pages: int, size: int, seconds: float) -> None:
        """A batch that moved ``pages`` pages of together ``size`` bytes in ``seconds``."""
        if self._enabled and pages:
            with self._lock:
                self._batches.append((is_load, pages, size / max(seconds, 1e-9) / 1e9))

    def drain(self) -> dict[str, list] | None:
        """The fields of SGLang's ``StorageMetrics``, or None where metrics are off."""
        if not self._enabled:
            return None
        with self._lock:
            batches = list(self._batches)
            self._batches.clear()
        return {
            "prefetch_pgs": [pages for is_load, pages, _ in batches if is_load],
            "backup_pgs": [pages for is_load, pages, _ in batches if not is_load],
            "prefetch_bandwidth": [speed for is_load, _, speed in batches if is_load],
            "backup_bandwidth": [speed for is_load, _, speed in batches if not is_load],
        }
