"""Which page comes before the first one of a call, where SGLang doesn't say.

A page's key hashes all tokens before it, so every page has exactly one page before it. The Cache
tier keeps prefixes longer than what follows them if it knows that page; being wrong, or not
knowing, costs hits and nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

_MOST = 4096


class PrefixLinks:
    """Keys of pages, each with the key of the page before it. Bounded; thread-safe.

    ``every``: how many pages SGLang transfers in one call at most.
    """

    def __init__(self, every: int, most: int = _MOST) -> None:
        self._every = every
        self._most = most
        self._lock = threading.Lock()
        self._before: OrderedDict[str, str] = OrderedDict()

    def learn(self, keys: Sequence[str], found: int) -> None:
        """From a lookup of a chain that found its first ``found`` pages.

        Noted are the pages that a later call can start with: those that loads start with, and the
        first that wasn't there, which will be dumped.
        """
        starts = list(range(self._every, found, self._every))
        if 0 < found < len(keys):
            starts.append(found)
        if not starts:
            return
        with self._lock:
            for start in starts:
                self._before[keys[start]] = keys[start - 1]
                self._before.move_to_end(keys[start])
            while len(self._before) > self._most:
                self._before.popitem(last=False)

    def before(self, key: str) -> str | None:
        """The key of the page before ``key``'s, if a lookup has told."""
        with self._lock:
            return self._before.get(key)
