"""What an attached backend tells the outside: pages counted, metrics, the stats file.

One daemon thread brings the metrics up to the store's counters and writes the file, about once a
second. Nothing here raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .config import Config
from .errors import StoreClosed
from .metrics import Metrics
from .page_counts import PageCounts
from .stats_file import INTERVAL, StatsFile
from .throttle import Throttle
from .ticker import Ticker

# Of SGLang's storage config: which part of the model this is.
_RANKS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dp_rank")

_JOIN_SECONDS = 5.0  # a file system that hangs keeps the thread, and not the detach


class Reports:
    """Of one attach, from when the store is open. Thread-safe.

    ``stats``: the store's counters by name, or `StoreClosed`. ``given``: SGLang's storage config;
    there are metrics where it says that SGLang's are on. ``identity``: directory name of the
    store's first one.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, int]],
        *,
        given: Any,
        config: Config,
        pipeline: str,
        identity: str,
        throttle: Throttle,
    ) -> None:
        self._stats = stats
        self._pid = os.getpid()
        self._throttle = throttle
        self.counts = PageCounts()
        ranks = {name: getattr(given, name) for name in _RANKS}
        labels = {"model_name": given.model_name or ""} | ranks
        on = given.enable_storage_metrics
        self._metrics = Metrics(labels, self._failed("metrics")) if on else None
        self._file = StatsFile(
            config.cache_buffer_directory,
            {
                "model": given.model_name or "",
                "pipeline": pipeline,
                "directories": list(config.storage_backends),
                "identity": identity,
                "ranks": ranks,
            },
            self._failed("the stats file, without which `cachestore top` doesn't see this server"),
        )
        self._ticker: Ticker | None = None

    def _failed(self, what: str) -> Callable[[str], None]:
        def say(why: str) -> None:
            self._throttle.log(logging.WARNING, f"reports: {what}", f"{what}: {why}")

        return say

    def start(self) -> None:
        """Begin to tell; until `finish`."""
        try:
            self._ticker = Ticker(self._tell, INTERVAL, "cachestore-stats")
        except RuntimeError as error:  # no more threads
            self._failed("nothing is reported")(str(error))

    def add_pool(self, name: str) -> None:
        """Have a pool in what is told, with zeroes."""
        self.counts.add_pool(name)
        if self._metrics is not None:
            self._metrics.add_pool(name)

    def looked(self, pages: int, hits: int, seconds: float) -> None:
        """SGLang looked up so many pages."""
        if os.getpid() != self._pid:
            return
        self.counts.look(pages, hits)
        if self._metrics is not None:
            self._metrics.add_lookup(pages, hits, seconds)

    def moved(
        self, pool: str, move: str, codes: Sequence[int], page_bytes: int, seconds: float
    ) -> None:
        """A batch was loaded or dumped (`page_counts`). ``codes``: one `Code` a page."""
        if os.getpid() != self._pid:
            return  # another thread may hold a lock in this child for ever
        results, size = self.counts.add(pool, move, codes, page_bytes)
        if self._metrics is not None:
            self._metrics.add_pages(pool, move, results, size, seconds)

    def _tell(self) -> None:
        try:
            stats = self._stats()
            if self._metrics is not None:
                self._metrics.follow(stats)
            counters = {**stats, **self.counts.lookups()}
            self._file.write({"counters": counters, "pools": self.counts.pools()})
        except StoreClosed:
            pass
        except Exception as error:
            self._throttle.log(
                logging.ERROR, "reports", f"nothing is reported: {error!r}", traceback=True
            )

    def stop(self) -> None:
        """End the thread. Pages are still counted."""
        if self._ticker is not None:
            self._ticker.stop(_JOIN_SECONDS)

    def finish(self, stats: Mapping[str, int]) -> None:
        """After `stop` and the store's end: its last counters; the file goes."""
        if self._metrics is not None:
            self._metrics.finish(stats)
        self._file.close()
