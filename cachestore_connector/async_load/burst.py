"""What the scheduler thread hands to the loader thread."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from .waiting import wait_for


@dataclasses.dataclass(frozen=True)
class LoadBurst:
    """One submission: a merged operation, its slot, and the fence that was captured with it."""

    op: Any
    producer_event: Any
    fence_event: Any


class BurstDoneEvent:
    """Stands for the device event that a burst on the loader will finish with.

    The allocator is given the event of its latest load-back on the scheduler thread, and later lets
    a stream wait for it before it moves or frees pages. An event that isn't recorded yet would let
    it through, so this one isn't done before the burst is enqueued: ``query`` says so, ``wait`` and
    ``synchronize`` first wait for the loader, then use the real event. Made by the scheduler
    thread, one a burst; resolved once, by the loader thread.
    """

    def __init__(self, loader: threading.Thread | None):
        self._loader = loader
        self._resolved = threading.Condition()
        self._event: Any = None

    def resolve(self, event: Any) -> None:
        """The burst is enqueued, and ends with ``event``."""
        with self._resolved:
            self._event = event
            self._resolved.notify_all()

    def query(self) -> bool:
        """Whether the burst is enqueued and the device has finished it."""
        return self._event is not None and self._event.query()

    def wait(self, stream: Any = None) -> None:
        """Let ``stream`` wait for the burst; torch's ``Stream.wait_event`` calls this."""
        self._real().wait(stream)

    def synchronize(self) -> None:
        """Wait until the device has finished the burst."""
        self._real().synchronize()

    def _real(self) -> Any:
        with self._resolved:
            wait_for(
                self._resolved,
                lambda: self._event is not None,
                "a burst to be enqueued",
                self._loader,
            )
            return self._event
