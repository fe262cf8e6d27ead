"""Data flows one way: who may import and include whom (docs/design.md)."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cachestore_connector"
NATIVE = ROOT / "native" / "src"

# The load-back thread, beside the store: neither imports anything of the other.
ASYNC_LOAD = [
    {"async_load"},
    {"install"},
    {"lifecycle", "tree"},
    {"controller", "failed_bursts", "known_code"},
    {"burst", "layer_events", "wrapping"},
    {"waiting"},
]
# From the top down; a module imports only those of lower layers.
LAYERS = [
    {"plugin"},
    {"backend"},
    {"context_ranks"},
    *ASYNC_LOAD,
    {"summary"},
    {"flat_pages", "opening", "pool_calls"},
    {"pools", "reports"},
    {"metrics", "stats_file", "ticker"},
    {"metrics_table", "page_counts"},
    {"leftovers", "verification"},
    {"block_check", "clearing"},
    {"disk_usage", "instances", "on_disk"},
    {"settings_page", "stats_view", "ucm_settings"},
    {"stats_reader"},
    {"manifest", "model_facts"},
    {"config", "guard", "identity", "pages", "prefix_links", "store", "throttle", "transfer_log"}
    | {"log_level", "prefix_hits", "ranks", "weights"},
    {"_config_file", "_settings_table", "_ffi", "_ucm_keys", "pool_tensors"},
    {"_setting_types"},
    {"errors", "host_memory", "mounts", "_native"},
]
USES_SGLANG = {"backend", "context_ranks", "plugin", "pool_calls"} | set().union(*ASYNC_LOAD)
USES_TORCH = {"backend", "plugin", "flat_pages", "pages", "pool_calls", "pool_tensors"}

# The subcommands: none imports another, and none what imports sglang or torch. Modules whose names
# begin with a subcommand's and `_` are its parts.
CLI_COMMON = {"output", "places"}
# Says what of SGLang fits; imports it, and what relies on it, inside a function.
CLI_USES_SGLANG = {"doctor_sglang": {"plugin", "async_load"}}

# What each part of the native store may include beside itself.
INCLUDES = {
    "base": set(),
    "tier": {"base"},
    "posix": {"base", "tier"},
    "host_copy": {"base"},
    "cache": {"base", "tier", "host_copy"},
    "pipeline": {"base", "tier", "posix", "cache", "host_copy"},
    "": {"base", "tier", "pipeline"},  # store and c_api: they know no tier
}


def _modules():
    return sorted(PACKAGE.rglob("*.py"))


def _imports(path):
    """(absolute top-level names, own modules) that a file imports, wherever in it."""
    absolute, own = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            absolute |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            absolute.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            own |= {name.split(".")[0] for name in names}
    return absolute, own


@pytest.mark.parametrize("path", _modules(), ids=lambda path: path.name)
def test_python_imports_go_down(path):
    """Pinned: no module imports one of its own or a higher layer; outsiders only where allowed."""
    absolute, own = _imports(path)
    name = path.stem
    if name in ("__init__", "_ffi_build"):
        assert not absolute & {"sglang", "torch"}
        return
    if path.parent.name == "cli":
        every = set().union(*LAYERS)
        parts = {each.stem for each in path.parent.glob(f"{name.split('_')[0]}_*.py")}
        allowed = (every | CLI_COMMON | parts) - USES_SGLANG - USES_TORCH
        assert own <= allowed | CLI_USES_SGLANG.get(name, set()), own
        assert not absolute & {"sglang", "torch"}
        return
    (layer,) = [i for i, members in enumerate(LAYERS) if name in members]
    allowed = set().union(*LAYERS[layer + 1 :])
    if path.parent.name == "async_load":
        allowed &= set().union(*ASYNC_LOAD)
    elif name != "plugin":
        allowed -= set().union(*ASYNC_LOAD)
    assert own <= allowed, f"{name} imports {own - allowed}"
    assert "sglang" not in absolute or name in USES_SGLANG
    assert "torch" not in absolute or name in USES_TORCH


def test_only_one_door_to_native():
    """Pinned: the compiled module is imported by _ffi, and _ffi by store, alone."""
    importers = {path.stem for path in _modules() if "_native" in _imports(path)[1]}
    assert importers == {"_ffi"}
    assert {path.stem for path in _modules() if "_ffi" in _imports(path)[1]} == {"store"}


def test_importing_the_package_is_light():
    """Pinned: `import cachestore_connector` brings neither sglang nor torch nor the native part."""
    code = (
        "import sys, cachestore_connector; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('sglang', 'torch') or m.endswith('._native')))"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


@pytest.mark.parametrize("path", sorted(NATIVE.rglob("*.*")), ids=lambda p: p.name)
def test_native_includes_go_down(path):
    """Pinned: tiers know tier/ and base/, nothing of each other; base/ knows nothing."""
    part = path.relative_to(NATIVE).parts[0] if path.parent != NATIVE else ""
    for include in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")):
        other = include.rpartition("/")[0]
        if include == "cachestore/c_api.h" or other == part:
            continue
        assert other in INCLUDES[part], f"{path.name} includes {include}"


def test_system_calls_stay_behind_env():
    """Pinned: their places: Env (tests make it fail), shared memory, threads, locks and forks."""
    headers = re.compile(r"#include <(fcntl|unistd|dirent|sys/(stat|vfs|mman|file|random))\.?h?>")
    callers = {path.name for path in NATIVE.rglob("*.*") if headers.search(path.read_text("utf-8"))}
    assert callers == {"env.cc", "fork.cc", "rename_new.cc", "shared_memory.cc", "system.cc"}
