"""What a backend call answers when it fails: SGLang's threads end with the first exception."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from .errors import CacheStoreError


def never_raises(fallback: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Answer with ``fallback(*args)`` where the method raises, and log that by its `_throttle`."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._throttle.log(
                    logging.ERROR,
                    f"exception in {method.__name__}",
                    f"{method.__name__} failed: {error!r}",
                    traceback=not isinstance(error, CacheStoreError | ValueError),
                )
                return fallback(*args, **kwargs)

        return call

    return decorate


def all_false(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    """False for each key."""
    return [False] * len(keys)


def all_none(keys: Sequence[str], *_: Any, **__: Any) -> list[None]:
    """None for each key."""
    return [None] * len(keys)
