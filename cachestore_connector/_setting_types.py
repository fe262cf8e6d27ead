"""Types of settings: each turns a raw YAML or JSON value into its final form, or refuses it.

Types are strict, since a silently converted value is a silently wrong one: ``true`` is not an
integer, ``"8"`` is not an integer, ``8.0`` is not an integer.
"""

from __future__ import annotations

import difflib
import os
import pwd
import re
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError


class SettingType:
    """What values a setting takes.

    ``nullable``: whether the final form may be None (the setting has no value of its own).
    """

    def __init__(self, *, nullable: bool = False) -> None:
        self.nullable = nullable

    def allowed(self, unit: str) -> str:
        """One clause for messages and documentation."""
        return self._values(unit) + (", or left out" if self.nullable else "")

    def _values(self, unit: str) -> str:
        raise NotImplementedError

    def parse(self, key: str, value: Any, unit: str, environ: Mapping[str, str]) -> Any:
        """The final form of a raw value that isn't None. Raises `ConfigError`."""
        self.check(key, value, unit)
        return value

    def check(self, key: str, value: Any, unit: str) -> None:
        """Raise `ConfigError` unless ``value`` is a final form."""
        if value is None and self.nullable:
            return
        hint = self._refusal(value)
        if hint is not None:
            raise ConfigError(key, value, self.allowed(unit), hint=hint)

    def _refusal(self, value: Any) -> str | None:
        """None if the value is fine; else a hint, which may be empty."""
        raise NotImplementedError


class Bool(SettingType):
    """True or false. ``refused_true``: why true can't be had, if it can't."""

    def __init__(self, *, refused_true: str = "") -> None:
        super().__init__()
        self.refused_true = refused_true

    def _values(self, unit: str) -> str:
        return "false" if self.refused_true else "true or false"

    def _refusal(self, value: Any) -> str | None:
        if type(value) is bool:
            return self.refused_true if value and self.refused_true else None
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return "write it without quotes"
        return ""


class BoolOr(Bool):
    """True, false, or one word that says more than true."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def _values(self, unit: str) -> str:
        return f"true, false or {self.word}"

    def _refusal(self, value: Any) -> str | None:
        if isinstance(value, str):
            if value == self.word:
                return None
            near = _near(value, {self.word: self.word})
            return f"did you mean {near}?" if near else super()._refusal(value)
        return super()._refusal(value)


class Int(SettingType):
    """An integer from ``low`` to ``high``; ``why`` is the reason of the lower limit, if any."""

    def __init__(self, low: int, high: int, *, why: str = "", nullable: bool = False) -> None:
        super().__init__(nullable=nullable)
        self.low, self.high, self.why = low, high, why

    def _values(self, unit: str) -> str:
        remarks = "; ".join(remark for remark in (unit, self.why) if remark)
        return f"an integer from {self.low} to {self.high}" + (f" ({remarks})" if remarks else "")

    def _refusal(self, value: Any) -> str | None:
        if type(value) is not int:
            return _not_an_int(value)
        return None if self.low <= value <= self.high else ""


class Number(SettingType):
    """A positive number up to ``high``, with or without a fraction; zero too with ``zero``."""

    def __init__(self, high: int, *, zero: bool = False, nullable: bool = False) -> None:
        super().__init__(nullable=nullable)
        self.high, self.zero = high, zero

    def _values(self, unit: str) -> str:
        low = "from 0" if self.zero else "above 0 and"
        return f"a number {low} up to {self.high}" + (f" ({unit})" if unit else "")

    def _refusal(self, value: Any) -> str | None:
        if type(value) not in (int, float):
            return "" if isinstance(value, float) else _not_an_int(value)
        return None if 0 < value <= self.high or (self.zero and value == 0) else ""


class Numbers(Number):
    """One positive number, or a list of them; a list is a tuple in its final form.

    ``each``: what an element of the list is for.
    """

    def __init__(self, high: int, *, each: str, nullable: bool = False) -> None:
        super().__init__(high, nullable=nullable)
        self.each = each

    def _values(self, unit: str) -> str:
        return f"{super()._values(unit)}, or a list of one for each of {self.each}"

    def parse(self, key: str, value: Any, unit: str, environ: Mapping[str, str]) -> Any:
        value = tuple(value) if isinstance(value, list) else value
        return super().parse(key, value, unit, environ)

    def _refusal(self, value: Any) -> str | None:
        if not isinstance(value, tuple):
            return super()._refusal(value)
        if not value:
            return "it is empty"
        for index, element in enumerate(value):
            hint = super()._refusal(element)
            if hint is not None:
                return f"element {index} is {element!r}" + (f", {hint}" if hint else "")
        return None


class IntList(SettingType):
    """A list of positive integers; a tuple in its final form."""

    _element = Int(1, 2**63 - 1)

    def _values(self, unit: str) -> str:
        return "a list of positive integers" + (f" ({unit})" if unit else "")

    def parse(self, key: str, value: Any, unit: str, environ: Mapping[str, str]) -> Any:
        value = tuple(value) if isinstance(value, list) else value
        return super().parse(key, value, unit, environ)

    def _refusal(self, value: Any) -> str | None:
        if not isinstance(value, tuple):
            return "write it as a list, as in [4096, 4096]"
        if not value:
            return "it is empty"
        for index, element in enumerate(value):
            hint = self._element._refusal(element)
            if hint is not None:
                return f"element {index} is {element!r}" + (f", {hint}" if hint else "")
        return None


class Choice(SettingType):
    """One of some words, in exactly this spelling."""

    def __init__(self, *words: str, nullable: bool = False) -> None:
        super().__init__(nullable=nullable)
        self.words = words

    def _values(self, unit: str) -> str:
        *first, last = self.words
        return f"{', '.join(first)} or {last}" if first else last

    def _refusal(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return "write it as a string"
        if value in self.words:
            return None
        near = _near(value, {word.casefold(): word for word in self.words})
        return f"did you mean {near}?" if near else ""


class Text(SettingType):
    """A string with something in it."""

    def _values(self, unit: str) -> str:
        return "a non-empty string"

    def _refusal(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return "write it in quotes"
        return None if value.strip() else ""


class Absent(SettingType):
    """Nothing at all: a key that is known, and refused with the reason ``why``."""

    def __init__(self, why: str) -> None:
        super().__init__(nullable=True)
        self.why = why

    def allowed(self, unit: str) -> str:
        return "nothing: the key left out"

    def _refusal(self, value: Any) -> str | None:
        return self.why


class CpuList(SettingType):
    """``auto``, ``none``, or CPUs as the kernel lists them: numbers and ranges between commas."""

    _highest = 65535  # the native side's limit too

    def _values(self, unit: str) -> str:
        return 'auto, none, or CPUs such as "0-3,8"'

    def _refusal(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return 'write it in quotes, as in "0-3,8"'
        if value in ("auto", "none"):
            return None
        for part in value.split(","):
            numbers = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", part)
            if numbers is None:
                return f"{part!r} is neither a number nor a range such as 0-3"
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if last < first:
                return f"the range {part} goes down"
            if last > self._highest:
                return f"{last} is above the highest number, {self._highest}"
        return None


class Directory(SettingType):
    """One absolute path, as an entry of `Directories`."""

    def _values(self, unit: str) -> str:
        return "an absolute path"

    def parse(self, key: str, value: Any, unit: str, environ: Mapping[str, str]) -> Any:
        try:
            return _normalised(_expanded(value, environ))
        except ValueError as error:
            raise ConfigError(key, value, self.allowed(unit), hint=str(error)) from None

    def _refusal(self, value: Any) -> str | None:
        try:
            if isinstance(value, str) and _normalised(value) == value:
                return None
        except ValueError as error:
            return str(error)
        return "it is not a normalised path"


class Directories(SettingType):
    """Absolute paths: a list, or one string with ``:`` between them. A tuple in its final form.

    An entry of a list is one path, whatever is in it; a path with a ``:`` in it needs the list.
    ``$VAR`` and ``${VAR}`` expand, then a leading ``~`` or ``~user`` does, in both forms; ``$$``
    stands for a ``$``. A variable that is undefined or empty is refused, since ``$X/cache`` would
    quietly become ``/cache``. A relative path is refused too: SGLang's processes need not share
    a working directory, so it could name several places. Trailing and double slashes and ``.``
    components are dropped; a path with ``..`` is resolved by the file system, links and all.
    Two entries that come out the same are refused, since blocks would not be spread as asked.
    """

    def _values(self, unit: str) -> str:
        return "a list of absolute paths, or one string with ':' between absolute paths"

    def parse(self, key: str, value: Any, unit: str, environ: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            entries, joined = value.split(":"), True
        elif isinstance(value, (list, tuple)):
            entries, joined = list(value), False
        else:
            raise ConfigError(key, value, self.allowed(unit))
        paths = []
        for index, entry in enumerate(entries):
            try:
                path = _expanded(entry, environ)
                if joined and ":" in path:
                    raise ValueError("it has a ':' once expanded: write the paths as a list")
                paths.append(_normalised(path))
            except ValueError as error:
                where = f"entry {index}, {entry!r}: {error}"
                raise ConfigError(key, value, self.allowed(unit), hint=where) from None
        final = tuple(paths)
        hint = self._refusal(final)
        if hint is not None:
            raise ConfigError(key, value, self.allowed(unit), hint=hint)
        return final

    def _refusal(self, value: Any) -> str | None:
        if not isinstance(value, tuple):
            return "its final form is a tuple"
        if not value:
            return "at least one directory is needed"
        for index, path in enumerate(value):
            try:
                if not isinstance(path, str) or _normalised(path) != path:
                    return f"entry {index}, {path!r}, is not a normalised path"
            except ValueError as error:
                return f"entry {index}, {path!r}: {error}"
            if path in value[:index]:
                return f"entry {index} is {path!r} again"
        return None


def default_directories(environ: Mapping[str, str]) -> tuple[str, ...]:
    """``$XDG_CACHE_HOME/cachestore``, or ``~/.cache/cachestore``.

    An empty or relative ``XDG_CACHE_HOME`` is ignored: XDG Base Directory Specification, "All
    paths set in these environment variables must be absolute. If an implementation encounters a
    relative path [...] it should consider the path invalid and ignore it."
    """
    base = environ.get("XDG_CACHE_HOME", "")
    try:
        if not base.startswith("/"):
            base = _home("~", environ) + "/.cache"
        return (_normalised(base + "/cachestore"),)
    except ValueError as error:
        raise ConfigError(
            "storage_backends", None, Directories().allowed(""), hint=f"no default: {error}"
        ) from None


# `$$`, `$name`, `${anything}`, and a `${` that is never closed.
_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\}|(\{))")


def _expanded(entry: Any, environ: Mapping[str, str]) -> str:
    """The entry with its variables, then its home directory, put in. Raises ValueError."""
    if not isinstance(entry, str):
        raise ValueError("a path must be a string")
    if not entry:
        raise ValueError("it is empty")

    def put_in(match: re.Match[str]) -> str:
        dollar, bare, braced, unclosed = match.groups()
        if dollar:
            return "$"
        if unclosed:
            raise ValueError("a ${ has no } in the same path")
        name = bare or braced
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"${{{name}}} is not the name of a variable")
        if not environ.get(name):
            state = "empty" if name in environ else "not defined"
            raise ValueError(f"the environment variable {name} is {state} (a '$' itself is '$$')")
        return environ[name]

    path = _VARIABLE.sub(put_in, entry)
    if path.startswith("~"):
        user, slash, rest = path.partition("/")
        path = _home(user, environ) + slash + rest
    return path


def _home(user: str, environ: Mapping[str, str]) -> str:
    """The home directory that ``~`` or ``~name`` means. Raises ValueError."""
    if user == "~" and environ.get("HOME"):
        home = environ["HOME"]
    else:
        try:
            entry = pwd.getpwuid(os.getuid()) if user == "~" else pwd.getpwnam(user[1:])
        except (KeyError, ValueError):
            raise ValueError(f"{user} has no home directory") from None
        home = entry.pw_dir
    if not home.startswith("/"):
        raise ValueError(f"the home directory of {user}, {home!r}, is not absolute")
    return home


def _normalised(path: str) -> str:
    """An absolute path without trailing or double slashes or dots. Raises ValueError."""
    if not path.startswith("/"):
        raise ValueError("it is not an absolute path")
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise ValueError("it has a control character in it")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError("it can't be encoded as a file name") from None
    if ".." in path.split("/"):
        # Dropping "link/.." as text would name another directory where link is a symbolic link.
        path = os.path.realpath(path)
    # normpath keeps two leading slashes, which POSIX allows a system to treat as special.
    return "/" + os.path.normpath(path).lstrip("/")


def _not_an_int(value: Any) -> str:
    if isinstance(value, bool):
        return "true and false are not numbers"
    if isinstance(value, float):
        return "write it without a decimal point" if value.is_integer() else "it has a fraction"
    if isinstance(value, str):
        return "it is a string: write the number without quotes or a unit"
    return ""


def _near(word: str, known: Mapping[str, str]) -> str | None:
    close = difflib.get_close_matches(word.casefold(), list(known), n=1, cutoff=0.6)
    return known[close[0]] if close else None
