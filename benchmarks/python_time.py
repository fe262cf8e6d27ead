"""Where CacheStore's own time goes: native calls, and what Python does before and after them."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable
from typing import Any

from cachestore_connector import store as store_module
from cachestore_connector.backend import CacheStore
from cachestore_connector.identity import Identity
from cachestore_connector.pages import PageLayout
from cachestore_connector.store import Store

_CALLS = ("batch_set_v1", "batch_get_v1", "batch_exists")
_NATIVE = ("cs_dump", "cs_load", "cs_wait", "cs_lookup_prefix")


class PythonTime:
    """Inside ``with``, measures every call of CacheStore, and its parts without their parts.

    It replaces the functions on their classes, so it is for one thread and for profiling alone.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []
        self._stack: list[list[Any]] = []  # [name, seconds spent in parts]
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._calls: collections.Counter[str] = collections.Counter()
        self._seconds: dict[tuple[str, str], float] = collections.defaultdict(float)

    def __enter__(self) -> PythonTime:
        for name in _CALLS:
            self._replace(CacheStore, name, name)
        self._replace(Identity, "block_ids", "block ids")
        self._replace(PageLayout, "addresses", "addresses")
        self._replace(CacheStore, "_transfer", "results")
        self._replace(Store, "_transfer", "cffi arguments")
        self._replace(Store, "_run", "cffi arguments")
        self._replace(Store, "lookup_prefix", "cffi arguments")
        native = _Native()
        for name in _NATIVE:
            function = getattr(store_module.lib, name)
            setattr(native, name, self._timed(function, f"native {name}"))
        self._saved.append((store_module, "lib", store_module.lib))
        native.rest = store_module.lib
        store_module.lib = native
        return self

    def __exit__(self, *_: object) -> None:
        while self._saved:
            owner, name, value = self._saved.pop()
            setattr(owner, name, value)

    def _replace(self, owner: type, name: str, label: str) -> None:
        owner = next(kind for kind in owner.__mro__ if name in kind.__dict__)
        original = owner.__dict__[name]
        self._saved.append((owner, name, original))
        setattr(owner, name, self._timed(original, label))

    def _timed(self, function: Callable, label: str) -> Callable:
        @functools.wraps(function, assigned=("__doc__",), updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            self._stack.append([label, 0.0])
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                _, in_parts = self._stack.pop()
                if self._stack:
                    self._stack[-1][1] += spent
                    outermost = self._stack[0][0]
                else:
                    outermost = label
                    self._calls[label] += 1
                self._seconds[outermost, label] += spent - in_parts

        return call

    def table(self) -> str:
        """Microseconds a batch, by call and part."""
        lines = []
        for name, calls in self._calls.items():
            parts = {part: s for (call, part), s in self._seconds.items() if call == name}
            total = sum(parts.values())
            lines.append(f"  {name}: {calls} batches, {total / calls * 1e6:.0f} us each")
            for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
                label = "the rest" if part == name else part
                share = 100 * seconds / total
                lines.append(f"    {seconds / calls * 1e6:10.1f} us {share:5.1f} %  {label}")
        return "\n".join(lines)


class _Native:
    """Stands in for the native library: some functions are timed, the rest are its own."""

    rest: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rest, name)
