"""The text of ``docs/settings.md``, from the table of settings.

After a change of the table: ``python -m cachestore_connector.settings_page > docs/settings.md``.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from .config import CONFIG_VARIABLE, SETTINGS

COMMAND = "python -m cachestore_connector.settings_page > docs/settings.md"

# Which settings belong together, by how their names begin; the first that fits.
_PARTS = (
    ("The files", ("storage_backends", "posix_", "verify", "io_direct", "timeout_ms")),
    ("The buffer before the files, of MLA models", ("cache_", "share_buffer_enable")),
    ("What is shared with whom", ("namespace", "model_identity")),
    ("The pipeline", ("store_pipeline",)),
    ("Filled in, or not built: leave them out", ("",)),
)
_NOT_BUILT = ("cache_io_aggregation", "cache_sdma_direct")


def text() -> str:
    """The whole page."""
    blocks = [
        f"<!-- Made from cachestore_connector/_settings_table.py by: {COMMAND} -->",
        "# Settings",
        _filled(
            "A setting is taken from SGLang's `--hicache-storage-backend-extra-config` (JSON, or "
            f"`@file`), else from the YAML or JSON file that the environment variable "
            f"`{CONFIG_VARIABLE}` names, else it has its default. A key that is left out, or null, "
            "takes its default. What can't be used stops the attach, with an error that names the "
            "key, its value and what is allowed; `cachestore doctor --config FILE` says so "
            "beforehand, with line numbers. "
            "[configs/cachestore.yaml](../configs/cachestore.yaml) is a file with all of them at "
            "their defaults."
        ),
        _overview(),
    ]
    for title, names in _parts().items():
        blocks.append(f"## {title}")
        blocks += [_setting(name) for name in names]
    return "\n\n".join(blocks) + "\n"


def _parts() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {title: [] for title, _ in _PARTS}
    for name in SETTINGS:
        last = _PARTS[-1][0]
        title = next((title for title, starts in _PARTS if name.startswith(starts)), last)
        found[last if name in _NOT_BUILT else title].append(name)
    return found


def _overview() -> str:
    rows = ["| setting | default | unit |", "| --- | --- | --- |"]
    for names in _parts().values():
        rows += [
            f"| [`{name}`](#{name}) | {_cell(_default(name))} | {_unit(name)} |" for name in names
        ]
    return "\n".join(rows)


def _setting(name: str) -> str:
    metadata = SETTINGS[name].metadata
    unit = _unit(name)
    items = [
        ("Default", _default(name)),
        *([("Unit", unit)] if unit else []),
        ("Allowed", metadata["kind"].allowed("")),
        ("Change", metadata["when"]),
    ]
    lines = [f"- **{label}:** {said}" for label, said in items]
    return "\n\n".join([
        f"### {name}",
        _filled(metadata["doc"]),
        "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines),
    ])  # fmt: skip


def _default(name: str) -> str:
    row = SETTINGS[name]
    if row.metadata["default_text"]:
        return re.sub(r"\[([^]]+)\]", r"`\1`", row.metadata["default_text"])
    return "none" if row.default is None else f"`{_word(row.default)}`"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unit(name: str) -> str:
    return SETTINGS[name].metadata["unit"].replace("2**30", "`2**30`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    print(text(), end="")
