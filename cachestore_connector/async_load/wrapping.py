"""Wrapping a method in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: type, name: str, hook: Callable) -> None:
    """``hook(original, self, ...)`` in place of the method that ``owner`` itself has."""
    original = owner.__dict__[name]

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    wrapper.hook = hook  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def is_wrapped(owner: type, name: str, hook: Callable) -> bool:
    """Whether ``hook`` is around the method, whoever else's is too."""
    function = getattr(owner, name)
    while function is not None:
        if getattr(function, "hook", None) is hook:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
