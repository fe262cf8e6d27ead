"""Exception classes of the connector, and the one `check` of native status codes.

Each class also inherits the built-in exception it resembles, so that a caller can write
``except TimeoutError`` without knowing this package. All classes survive pickling, since SGLang
hands exceptions between processes.
"""

from __future__ import annotations

import enum
import errno
from typing import Any

_SHOWN_VALUE_CHARS = 200


class CacheStoreError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(CacheStoreError, ValueError):
    """A setting that can't be used. The message names key, value and what is allowed.

    ``key``: the setting, or what stands for it (an environment variable, ``extra config``).
    ``value``: the refused value, as given. ``allowed``: one clause that says what would be taken.
    ``source``: where the value came from (``extra config``, ``/etc/c.yaml line 3``).
    ``hint``: one more clause, such as a did-you-mean.
    """

    def __init__(
        self, key: str, value: Any, allowed: str, *, source: str = "", hint: str = ""
    ) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        self.source = source
        self.hint = hint
        message = f"{key} = {_shown(value)}"
        if source:
            message += f" (from {source})"
        message += f": allowed is {allowed}"
        if hint:
            message += f"; {hint}"
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # The value may be anything a caller passed in, so only its text crosses to a process.
        fields = (self.key, _shown(self.value), self.allowed, self.source, self.hint)
        return _restore_config_error, (str(self), *fields)


def _restore_config_error(message: str, *fields: str) -> ConfigError:
    error = ConfigError.__new__(ConfigError, message)
    error.key, error.value, error.allowed, error.source, error.hint = fields
    return error


def _shown(value: Any) -> str:
    """The value for a message: JSON's spelling for the words people write in YAML, bounded."""
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"a {type(value).__name__} too long to show"
    if len(text) > _SHOWN_VALUE_CHARS:
        text = text[:_SHOWN_VALUE_CHARS] + "..."
    return text


class Code(enum.IntEnum):
    """Status codes of the native store, number for number as in ``cachestore/c_api.h``."""

    OK = 0
    NOT_FOUND = 1
    INVALID = 2
    CORRUPT = 3
    IO = 4
    NO_SPACE = 5
    TIMEOUT = 6
    REFUSED = 7
    CLOSED = 8
    NO_MEMORY = 9
    INTERNAL = 10


class StoreError(CacheStoreError, RuntimeError):
    """A failure the native store reported.

    ``code`` is the native status: a `Code`, or the bare int when this package doesn't know it.
    ``errno`` (of the subclasses that are OSErrors) is set where one value always fits.
    """

    def __init__(self, text: str, code: int = Code.INTERNAL) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.code)


class StoreNotFound(StoreError, LookupError):
    """The block isn't in the store."""


class StoreInvalidArgument(StoreError, ValueError):
    """The native side refused an argument or a setting."""


class StoreCorrupt(StoreError):
    """A stored block isn't what it says it is: checksum, identity or length is wrong."""


class StoreIOError(StoreError, OSError):
    """A system call of the store failed."""


class StoreNoSpace(StoreIOError):
    """The storage is full, or a quota or file size limit was met."""

    def __init__(self, text: str, code: int = Code.NO_SPACE) -> None:
        super().__init__(text, code)
        self.errno = errno.ENOSPC


class StoreTimeout(StoreError, TimeoutError):
    """The request met its terminal timeout (setting ``timeout_ms``)."""

    def __init__(self, text: str, code: int = Code.TIMEOUT) -> None:
        super().__init__(text, code)
        self.errno = errno.ETIMEDOUT


class StoreRefused(StoreError):
    """The queue had no room for the whole request; nothing of it was accepted."""


class StoreClosed(StoreError):
    """The store is closed, or was closed while the request waited."""


class StoreNoMemory(StoreError, MemoryError):
    """The store couldn't get the memory it needed."""


class StoreInternal(StoreError):
    """A broken invariant in the native store, or a status this package doesn't know."""


# One row per failure: its class, and what to say when the native side gave no text.
_FAILURES: dict[int, tuple[type[StoreError], str]] = {
    Code.NOT_FOUND: (StoreNotFound, "no such block"),
    Code.INVALID: (StoreInvalidArgument, "invalid argument"),
    Code.CORRUPT: (StoreCorrupt, "stored block is corrupt"),
    Code.IO: (StoreIOError, "input/output failed"),
    Code.NO_SPACE: (StoreNoSpace, "no space left in the storage"),
    Code.TIMEOUT: (StoreTimeout, "request timed out"),
    Code.REFUSED: (StoreRefused, "queue is full"),
    Code.CLOSED: (StoreClosed, "store is closed"),
    Code.NO_MEMORY: (StoreNoMemory, "out of memory"),
    Code.INTERNAL: (StoreInternal, "internal error"),
}


def check(code: int, text: str) -> None:
    """Return for ``Code.OK``; raise the matching `StoreError` for every other status.

    ``code``: a native status. ``text``: the native error text, which may be empty. A status this
    package doesn't know raises `StoreInternal` with that number as its ``code``. Thread-safe.
    """
    if code == Code.OK:
        return
    row = _FAILURES.get(code)
    if row is None:
        raise StoreInternal(f"unknown native status {code}: {text or 'no text'}", code)
    failure, fallback = row
    raise failure(text or fallback, Code(code))
