"""The only door to the native store: the compiled module's ``ffi`` and ``lib``."""

from __future__ import annotations

from pathlib import Path

try:
    from ._native import ffi, lib
except ImportError as error:
    here = Path(__file__).resolve().parent
    if (here.parent / "setup.py").exists():
        hint = (
            f"this is the source tree {here.parent}, which hides the installed package: Python "
            "puts the current directory first, so start it in another directory, or with "
            "PYTHONSAFEPATH=1"
        )
    else:
        hint = "install the package with `pip install .` (a C++20 compiler is needed)"
    raise ImportError(
        f"cachestore_connector's compiled part doesn't load ({error}): {hint}"
    ) from error

__all__ = ["ffi", "lib"]
