"""Builds ``cachestore_connector._native``: the C interface through cffi's API mode.

Run by setup.py alone. The whole native store is compiled into the one extension
module, so a C++20 compiler is all that installing needs.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

# setuptools wants paths relative to setup.py, with forward slashes.
ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"


def _sources() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in NATIVE.glob("src/**/*.cc"))


ffibuilder = FFI()
ffibuilder.cdef((Path(__file__).parent / "_ffi.cdef.h").read_text(encoding="utf-8"))
ffibuilder.set_source(
    "cachestore_connector._native",
    '#include "cachestore/c_api.h"',
    source_extension=".cc",
    sources=_sources(),
    include_dirs=["native/include", "native/src"],
    extra_compile_args=["-std=c++20", "-O2", "-g1", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
)
