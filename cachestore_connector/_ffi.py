"""The only door to the native store: the compiled module's ``ffi`` and ``lib``."""

from __future__ import annotations

try:
    from ._native import ffi, lib
except ImportError as error:  # a source tree, or a wheel for another platform
    raise ImportError(
        "cachestore_connector's compiled part is missing or doesn't load "
        f"({error}); install the package with `pip install .` (a C++20 compiler is needed)"
    ) from error

__all__ = ["ffi", "lib"]
