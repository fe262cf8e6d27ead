"""C++ for the run, compiled by the compiler that is there.

What was compiled is kept in ``build/benchmarks``, by what it was made of: the source, the headers
it includes, the compiler and the options.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence

HERE = pathlib.Path(__file__).resolve().parent
_ROOT = HERE.parent
_SOURCES = _ROOT / "native" / "src"
_INCLUDED = (_ROOT / "native" / "include", _SOURCES)
_KEPT = _ROOT / "build" / "benchmarks"
# As for the installed package (_ffi_build.py), but for symbols.
_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-pthread")


class CompilerMissing(RuntimeError):
    """There is no C++ compiler, or it can't compile something."""


def native_sources(*patterns: str) -> list[pathlib.Path]:
    """The store's sources by glob, such as ``base/*``."""
    return sorted(path for pattern in patterns for path in _SOURCES.glob(f"{pattern}.cc"))


def shared_library(sources: Sequence[pathlib.Path]) -> ctypes.CDLL:
    """The sources as a library, loaded. Raises `CompilerMissing`."""
    with tempfile.TemporaryDirectory(prefix="cachestore-bench-") as directory:
        path = os.path.join(directory, sources[0].stem + ".so")
        _run([*_compiler(), "-shared", "-pthread", "-o", path, *_objects(sources)])
        return ctypes.CDLL(path)  # stays mapped when the file is gone


def program(sources: Sequence[pathlib.Path], path: str) -> None:
    """The sources as the program ``path``. Raises `CompilerMissing`."""
    _run([*_compiler(), "-pthread", "-o", path, *_objects(sources)])


@functools.cache
def _compiler() -> tuple[str, ...]:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not found:
        raise CompilerMissing("no C++ compiler is found")
    return tuple(shlex.split(found))


def _objects(sources: Iterable[pathlib.Path]) -> list[str]:
    _KEPT.mkdir(parents=True, exist_ok=True)
    common = hashlib.sha256(repr((_compiler(), _OPTIONS)).encode())
    common.update(_run([*_compiler(), "--version"]).encode())

    def compiled(source: pathlib.Path) -> str:
        key = common.copy()
        for path in sorted(_made_of(source)):
            key.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
        name = str(source.relative_to(_ROOT)).replace(os.sep, "_")
        path = _KEPT / f"{name}-{key.hexdigest()[:16]}.o"
        if not path.exists():
            for stale in _KEPT.glob(f"{name}-*.o"):
                stale.unlink(missing_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            _run(
                [
                    *_compiler(),
                    *_OPTIONS,
                    *(f"-I{path}" for path in _INCLUDED),
                    "-c",
                    "-o",
                    str(new),
                    str(source),
                ]
            )
            new.replace(path)
        return str(path)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compiled, sources))


def _made_of(source: pathlib.Path) -> set[pathlib.Path]:
    """The source and the project's headers that it includes."""
    found, left = {source}, [source]
    while left:
        for name in re.findall(r'^#include "(.+)"', left.pop().read_text(), re.MULTILINE):
            paths = {path / name for path in _INCLUDED if (path / name).exists()} - found
            found |= paths
            left += paths
    return found


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CompilerMissing(f"{command[0]} can't be run: {error}") from error
    if done.returncode != 0:
        raise CompilerMissing(f"{shlex.join(command)}:\n{done.stderr}")
    return done.stdout
