"""The cffi declarations are the header's."""

import re
import subprocess
from pathlib import Path

import pytest

from cachestore_connector import _ffi
from cachestore_connector.errors import Code
from cachestore_connector.store import GAUGES, StoreOptions

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "native" / "include" / "cachestore" / "c_api.h"
CDEF = ROOT / "cachestore_connector" / "_ffi.cdef.h"


def _tokens(text):
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    return re.findall(r"\w+|[^\s\w]", text)


def test_declarations_equal_the_headers():
    """Pinned: token by token, types included; cffi would take a silently narrowed integer."""
    header = HEADER.read_text(encoding="utf-8")
    between = header.split("/* cdef: begin */")[1].split("/* cdef: end */")[0]
    assert _tokens(CDEF.read_text(encoding="utf-8")) == _tokens(between)


def test_nothing_is_declared_outside_the_marks():
    """Pinned: the header has no function or type that the comparison above would miss."""
    header = HEADER.read_text(encoding="utf-8")
    outside = header.split("/* cdef: begin */")[0] + header.split("/* cdef: end */")[1]
    outside = re.sub(r"/\*.*?\*/", " ", outside, flags=re.DOTALL)
    lines = [line for line in outside.splitlines() if line and not line.startswith("#")]
    assert [line.strip() for line in lines if line.strip()] == ['extern "C" {', "}"]


def test_codes_are_the_headers():
    """Pinned: errors.Code is cs_code, number for number."""
    native = {name: number for number, name in _ffi.ffi.typeof("cs_code").elements.items()}
    assert native == {f"CS_{code.name}": code.value for code in Code}


def test_every_config_field_is_filled_in():
    """Pinned: a field added to cs_config can't be forgotten on the Python side."""
    native = {name for name, _ in _ffi.ffi.typeof("cs_config").fields}
    derived = {"struct_size", "storage_backend_count", "tensor_count"}
    assert native - derived == set(StoreOptions.__dataclass_fields__)


def test_gauges_are_what_the_header_says_is_so_now():
    """Pinned: a field of cs_stats is a gauge where its comment, or its group's, says "now"."""
    header = HEADER.read_text(encoding="utf-8")
    fields = header[header.index("uint64_t lookup_blocks;") : header.index("} cs_stats;")]
    said = set()
    group = False
    for line in fields.splitlines():
        if line.strip().startswith("/*"):
            group = "Now;" in line
        name = re.search(r"uint64_t (\w+);(.*)", line)
        if name and (group or re.search(r"\bnow\b|likewise", name[2])):
            said.add(name[1])
    assert (
        said | {"cache_slots", "dump_outstanding", "cache_dump_queued", "cache_dump_running"}
        == GAUGES
    )


def test_the_header_is_c(tmp_path):
    """Pinned: c_api.h stands alone and compiles as C11, so that other languages can bind it."""
    source = tmp_path / "use.c"
    source.write_text(
        '#include "cachestore/c_api.h"\nint main(void) { return (int)sizeof(cs_config) < 0; }\n'
    )
    compiled = subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only",
         "-I", HEADER.parents[1], source],
        capture_output=True, text=True,
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.parametrize("call", ["cs_lookup", "cs_load", "cs_dump", "cs_wait", "cs_clear"])
def test_nulls_are_errors_not_crashes(call):
    """Pinned: a null store gives CS_INVALID and a text, in this thread."""
    function = getattr(_ffi.lib, call)
    null = _ffi.ffi.NULL
    arguments = {"cs_lookup": (null, 0, 0, null, null), "cs_wait": (null, 1, 0, null, 0)}.get(
        call, (null,) if call == "cs_clear" else (null, null, null)
    )
    assert function(*arguments) == Code.INVALID
    assert b"null" in _ffi.ffi.string(_ffi.lib.cs_last_error())
