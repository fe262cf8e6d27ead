"""`cachestore doctor`: SGLang, the plugin's hooks, and this installation.

SGLang is looked at in a process of its own: importing it takes seconds, may print, and may fail in
ways of its own where there is no GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from .doctor_finding import Finding, fail, ok, warn

_GROUP = "sglang.srt.plugins"
_NAME = "cachestore"
_TARGET = "cachestore_connector.plugin:register"
_PATIENCE = 300.0
_BEGIN = "cachestore-doctor "


def checks(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at this installation, then at SGLang's."""
    return [native(), entry_point(), *switched_off(environ), *hooks(_ask)]


def native() -> Finding:
    """Whether the compiled part can be loaded."""
    check = "native code"
    try:
        from .. import store  # noqa: F401
    except ImportError as error:
        return fail(
            check,
            f"it can't be loaded ({error}): the backend can't start",
            "install again (pip install .), with this Python, not from inside the sources",
        )
    return ok(check, f"loaded, with Python {sys.version.split()[0]}")


def entry_point(points: Any = None) -> Finding:
    """Whether SGLang finds the plugin."""
    check = "plugin"
    found = importlib.metadata.entry_points(group=_GROUP) if points is None else points
    ours = [point for point in found if point.name == _NAME]
    if not ours:
        return fail(
            check,
            f"no entry point {_NAME} in {_GROUP}: SGLang doesn't know the backend's name",
            "install it into SGLang's environment (pip install .); a path on PYTHONPATH won't do",
        )
    if any(point.value != _TARGET for point in ours):
        return fail(
            check,
            f"the entry point {_NAME} is {ours[0].value}, not {_TARGET}: another package's, or "
            "an old installation's",
            "pip uninstall it, and install cachestore again",
        )
    return ok(check, f"the entry point is installed ({_GROUP})")


def switched_off(environ: Mapping[str, str]) -> list[Finding]:
    """Whether SGLANG_PLUGINS leaves ours out."""
    given = environ.get("SGLANG_PLUGINS", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    if names and _NAME not in names:
        return [
            fail(
                "plugin",
                f"SGLANG_PLUGINS is {given!r}, which leaves ours out: SGLang doesn't load it",
                f"add {_NAME} to it, or use the dynamic backend (README)",
            )
        ]
    return []


def hooks(ask: Any) -> list[Finding]:
    """SGLang's version, and each hook. ``ask``: what looks at SGLang; its answer is `_look`'s."""
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [
            warn(
                "SGLang",
                "not installed in this environment: the hooks can't be looked at",
                "run this with the Python that the server runs with",
            )
        ]
    from ..async_load.known_code import SGLANG

    found = []
    if installed == SGLANG:
        found.append(ok("SGLang", f"version {installed}, the one that the hooks were made for"))
    else:
        found.append(
            warn(
                "SGLang",
                f"version {installed}; the hooks were made for {SGLANG}, and tested with it alone",
                f"pip install sglang=={SGLANG}, or go by what is said of each hook below",
            )
        )
    answer = ask()
    if isinstance(answer, str):
        return [*found, fail("hook", f"SGLang can't be imported: {answer}", "see to that first")]
    for target, problem in answer["hooks"].items():
        name = ".".join(target.rsplit(".", 2)[1:])
        if problem is None:
            found.append(ok("hook", f"{name} fits"))
        else:
            found.append(
                fail(
                    "hook",
                    f"{problem}: the plugin sets none of its hooks",
                    f"use SGLang {SGLANG}, or --hicache-storage-backend dynamic (README)",
                )
            )
    return [*found, _loader(answer["loader"])]


def _loader(misfits: list[str]) -> Finding:
    switch = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"
    if not misfits:
        return ok("hook", f"the load-back thread fits ({switch})")
    shown = ", ".join(misfits[:3]) + (f" and {len(misfits) - 3} more" if misfits[3:] else "")
    wanted = os.environ.get(switch, "").lower() in ("1", "true", "yes", "y", "on")
    say = f"the load-back thread doesn't fit ({shown}): {switch} stays off"
    if wanted:
        return fail("hook", f"{say}, and it is set", f"unset {switch}")
    return warn("hook", say, f"nothing, unless you want {switch}")


def _ask() -> dict[str, Any] | str:
    """`_look` in a process of its own; what went wrong, as text."""
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-m", __name__]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_PATIENCE:g} s"
    for line in done.stdout.splitlines():
        if line.startswith(_BEGIN):
            return json.loads(line[len(_BEGIN) :])
    lines = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
    return lines[-1][:300]


def _look() -> dict[str, Any]:
    """What is wrong with each hook, by target, and with the loader's. Imports SGLang."""
    import importlib

    from .. import plugin
    from ..async_load import known_code

    importlib.import_module("sglang")
    return {
        "hooks": {target: plugin._misfit(target) for target in plugin._PARAMETERS},
        "loader": known_code.misfits(),
    }


if __name__ == "__main__":
    print("\n" + _BEGIN + json.dumps(_look()), flush=True)
