"""errors.py: classes, messages, and the one check()."""

from __future__ import annotations

import errno
import inspect
import pickle

import pytest

from cachestore_connector import errors
from cachestore_connector.errors import (
    CacheStoreError,
    Code,
    ConfigError,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreInternal,
    StoreInvalidArgument,
    StoreIOError,
    StoreNoMemory,
    StoreNoSpace,
    StoreNotFound,
    StoreRefused,
    StoreTimeout,
    check,
)

# code -> (number in c_api.h, class, built-in it resembles)
TABLE = {
    Code.NOT_FOUND: (1, StoreNotFound, LookupError),
    Code.INVALID: (2, StoreInvalidArgument, ValueError),
    Code.CORRUPT: (3, StoreCorrupt, RuntimeError),
    Code.IO: (4, StoreIOError, OSError),
    Code.NO_SPACE: (5, StoreNoSpace, OSError),
    Code.TIMEOUT: (6, StoreTimeout, TimeoutError),
    Code.REFUSED: (7, StoreRefused, RuntimeError),
    Code.CLOSED: (8, StoreClosed, RuntimeError),
    Code.NO_MEMORY: (9, StoreNoMemory, MemoryError),
    Code.INTERNAL: (10, StoreInternal, RuntimeError),
}


def test_check_returns_on_ok() -> None:
    """Status 0 is success and raises nothing, whatever text is left over."""
    assert check(0, "left over") is None
    assert Code.OK == 0


@pytest.mark.parametrize("code", list(TABLE))
def test_check_raises_the_class_of_each_code(code: Code) -> None:
    """Every failure code has its number, one class of its own, its built-in, and keeps text."""
    number, failure, builtin = TABLE[code]
    assert code == number
    with pytest.raises(failure, match=r"^disk on fire$") as caught:
        check(number, "disk on fire")
    assert type(caught.value) is failure
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, StoreError)
    assert isinstance(caught.value, CacheStoreError)
    assert caught.value.code is code


def test_every_code_but_ok_is_in_the_table() -> None:
    """A new code can't be added without a class: this test lists them all."""
    assert set(Code) == {Code.OK, *TABLE}


@pytest.mark.parametrize("code", list(TABLE))
def test_check_says_something_without_native_text(code: Code) -> None:
    """An empty native text still gives a message."""
    with pytest.raises(StoreError) as caught:
        check(code, "")
    assert str(caught.value).strip()


@pytest.mark.parametrize("code", [11, -1, 1 << 20])
def test_unknown_code_is_an_error_with_its_number(code: int) -> None:
    """A status this package doesn't know is never success, and the number isn't lost."""
    with pytest.raises(StoreInternal, match=str(code)) as caught:
        check(code, "")
    assert caught.value.code == code


def test_errno_where_one_value_fits() -> None:
    """Callers that look at errno find ENOSPC and ETIMEDOUT, and the message stays whole."""
    with pytest.raises(OSError, match=r"^full$") as full:
        check(Code.NO_SPACE, "full")
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(TimeoutError, match=r"^late$") as late:
        check(Code.TIMEOUT, "late")
    assert late.value.errno == errno.ETIMEDOUT


def test_config_error_names_key_value_and_allowed() -> None:
    """The message has all three, and source and hint where given; it is a ValueError too."""
    error = ConfigError("depth", 5, "128 or more", source="a.yaml line 3", hint="raise it")
    for part in ("depth", "5", "128 or more", "a.yaml line 3", "raise it"):
        assert part in str(error)
    assert isinstance(error, ValueError)
    assert isinstance(error, CacheStoreError)
    assert (error.key, error.value, error.allowed) == ("depth", 5, "128 or more")


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (True, "true"), (False, "false"), ("8", "'8'")]
)
def test_config_error_shows_values_as_yaml_spells_them(value: object, shown: str) -> None:
    """A string is told from a number by its quotes, and null and booleans read as in the file."""
    assert str(ConfigError("k", value, "x")).startswith(f"k = {shown}:")


def test_config_error_bounds_a_huge_value() -> None:
    """A megabyte pasted into a setting doesn't become a megabyte of log."""
    assert len(str(ConfigError("k", "x" * 1_000_000, "short"))) < 400


def test_all_errors_survive_pickling() -> None:
    """Class, message and code cross to another process, also with a value that can't."""
    config = ConfigError("k", lambda: 0, "x", source="s", hint="h")
    copy = pickle.loads(pickle.dumps(config))
    assert type(copy) is ConfigError
    assert str(copy) == str(config)
    assert (copy.key, copy.allowed, copy.source, copy.hint) == ("k", "x", "s", "h")
    for failure in {row[1] for row in TABLE.values()}:
        error = failure("text", 77)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.code) == (failure, "text", 77)


def test_every_class_is_a_cachestore_error() -> None:
    """One except clause catches everything this package raises on purpose."""
    classes = [
        c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)
    ]
    assert len(classes) >= 13
    assert all(issubclass(c, CacheStoreError) for c in classes)
