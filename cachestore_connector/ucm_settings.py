"""From a UCM configuration (Unified Cache Manager, of ModelEngine) to settings of ours.

Source of UCM's keys: its documentation, "UCM Configuration Parameters" and "Quickstart-SGLang"
(github.com/ModelEngine-Group/unified-cache-management, docs/). SGLang's connector reads
``kv_connector_extra_config`` with one connector in it; vLLM's form, a list ``ucm_connectors``, is
read too, and so is a file of the connector's keys alone.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

import yaml

from . import config as settings
from ._config_file import _yaml_reason
from ._ucm_keys import (
    ALIASES,
    CONVERTED,
    DEVICE_PATHS,
    DYNAMIC_KEYS,
    FILLED_IN,
    NO_COUNTERPART,
    OTHER_STORE,
    OTHER_STORES,
    SAME,
)
from .errors import ConfigError

_NFS = "UcmNfsStore"
_CONNECTORS = ("UcmPipelineStore", _NFS)
_PIPELINES = ("Posix", settings.CACHE_POSIX)


@dataclasses.dataclass(frozen=True)
class Note:
    """A key that is left out. ``wants_attention``: its value can't be had, or it isn't known."""

    key: str
    line: int
    value: Any
    text: str
    wants_attention: bool = False


@dataclasses.dataclass
class Migration:
    """``given``: our settings; ``remarks``: a sentence for some of them, by key."""

    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    remarks: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[Note] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A value in the file, and the line of its key."""

    value: Any
    line: int


def migrate(text: str, path: str) -> Migration:
    """The settings that a UCM file means. ``path``: for messages.

    Raises `ConfigError` for what isn't a UCM configuration, or can't be kept on files by us.
    """
    root = _read(text, path)
    name, connector, others = _connector(root, path)
    migration = Migration()
    for key, entry in connector.items():
        _carry_over(migration, ALIASES.get(key, key), entry, path)
    _watermarks(migration, connector)
    for key, entry in others.items():
        _of_the_engine(migration, key, entry)
    if "storage_backends" not in migration.given:
        raise _error(path, 1, "storage_backends", None, "given: UCM's connector requires it too")
    if "store_pipeline" not in migration.given:
        migration.remarks["storage_backends"] = (
            "The same directories; what UCM stored in them isn't read, nor removed. The pipeline "
            "is left to the model (UCM's SGLang connector always takes Posix)."
        )
    if "io_direct" not in migration.given and name != _NFS:
        text = "not given: UCM's default is true, ours is false; set it to keep O_DIRECT"
        migration.notes.append(Note("io_direct", 0, None, text))
    if not {"posix_capacity_gb", "posix_free_space_reserve_gb"} & migration.given.keys():
        text = "no limit is given, so nothing is evicted and the disk fills up; docs/sizing.md"
        migration.notes.append(Note("posix_capacity_gb", 0, None, text))
    settings.load(migration.given, {})  # what is written can be read
    migration.given = {key: migration.given[key] for key in _order(migration.given)}
    return migration


def _order(given: dict[str, Any]) -> list[str]:
    ours = [key for key in settings.SETTINGS if key in given]
    return ours + [key for key in given if key not in settings.SETTINGS]


def text_of(migration: Migration, path: str) -> str:
    """Our YAML, with a comment for each key that has no counterpart."""
    head = (
        f"CacheStore settings, made from {path} by `cachestore migrate-config`. Every setting: "
        "docs/settings.md."
    )
    lines = [*_comment(head), ""]
    for key, value in migration.given.items():
        lines += _comment(migration.remarks.get(key, ""))
        lines.append(f"{key}: {_yaml(value)}")
    if migration.notes:
        lines += ["", *_comment("Not carried over:")]
        for note in migration.notes:
            where = f"line {note.line}, " if note.line else ""
            given = f": {_yaml(note.value)}" if note.line else ""
            lines += _comment(f"{where}{note.key}{given}: {note.text}.")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        80,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _yaml(value: Any) -> str:
    """JSON on one line, which is YAML, with words that need no quotes without them."""
    if isinstance(value, str) and yaml.safe_load(value or "~") == value and value.isprintable():
        plain = all(char.isalnum() or char in "/_-.|" for char in value)
        if plain:
            return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _error(path: str, line: int, key: str, value: Any, allowed: str, hint: str = "") -> ConfigError:
    return ConfigError(key, value, allowed, source=f"{path} line {line}", hint=hint)


def _read(text: str, path: str) -> dict[str, _Entry]:
    allowed = "a UCM configuration (YAML or JSON)"
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise ConfigError("FILE", path, allowed, hint="it is empty")
            if not isinstance(node, yaml.MappingNode):
                hint = f"it holds a {node.id}, not a mapping"
                raise _error(path, node.start_mark.line + 1, "FILE", path, allowed, hint)
            return _entries(loader, node, path)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError("FILE", path, allowed, hint=_yaml_reason(error, text)) from None
    except RecursionError:
        raise ConfigError("FILE", path, allowed, hint="it is nested too deeply") from None


def _entries(loader: yaml.SafeLoader, node: yaml.MappingNode, path: str) -> dict[str, _Entry]:
    """A mapping with the line of each key; mappings and lists of them below it likewise."""
    found: dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode):
            raise _error(path, line, "FILE", path, "keys that are plain words")
        if key in found:
            hint = f"it is there twice (first: line {found[key].line})"
            raise _error(path, line, key, value_node.value, "one value", hint)
        found[key] = _Entry(_value(loader, value_node, path), line)
    return found


def _value(loader: yaml.SafeLoader, node: yaml.Node, path: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _entries(loader, node, path)
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, each, path) for each in node.value]
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, AttributeError, LookupError, TypeError) as error:  # a tag that doesn't fit
        raise _error(path, node.start_mark.line + 1, "FILE", path, f"YAML; {error}") from None


def _connector(
    root: dict[str, _Entry], path: str
) -> tuple[str, dict[str, _Entry], dict[str, _Entry]]:
    """(the connector's name, its keys, those beside it), wherever in the file they are."""
    others = dict(root)
    outer = others.pop("kv_connector_extra_config", None)
    if outer is not None:
        if not isinstance(outer.value, dict):
            raise _error(path, outer.line, "kv_connector_extra_config", outer.value, "a mapping")
        others |= outer.value
    several = others.pop("ucm_connectors", None)
    if several is not None:
        if not isinstance(several.value, list) or not all(
            isinstance(each, dict) for each in several.value
        ):
            raise _error(
                path, several.line, "ucm_connectors", _plain(several), "a list of mappings"
            )
        if len(several.value) != 1:
            hint = f"there are {len(several.value)}"
            raise _error(path, several.line, "ucm_connectors", "...", "one connector", hint)
        others |= several.value[0]
    name = others.pop("ucm_connector_name", None)
    if name is not None and name.value not in _CONNECTORS:
        hint = "what it stores isn't in files of a directory"
        allowed = " or ".join(_CONNECTORS)
        raise _error(path, name.line, "ucm_connector_name", _plain(name), allowed, hint)
    named = _CONNECTORS[0] if name is None else name.value
    inner = others.pop("ucm_connector_config", None)
    if inner is not None:
        if not isinstance(inner.value, dict):
            raise _error(path, inner.line, "ucm_connector_config", inner.value, "a mapping")
        return named, inner.value, others
    if "storage_backends" not in others:
        raise ConfigError(
            "FILE",
            path,
            "a UCM configuration, with kv_connector_extra_config and ucm_connector_config in it",
            hint="neither that nor storage_backends is there",
        )
    known = {*settings.SETTINGS, *ALIASES, *FILLED_IN, *CONVERTED}
    return (
        named,
        {key: entry for key, entry in others.items() if key in known},
        {key: entry for key, entry in others.items() if key not in known},
    )


def _plain(entry: _Entry) -> Any:
    """The value without the lines."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(each.value) for key, each in value.items()}
        return [bare(each) for each in value] if isinstance(value, list) else value

    return bare(entry.value)


def _carry_over(migration: Migration, key: str, entry: _Entry, path: str) -> None:
    value = _plain(entry)

    def note(text: str, wants_attention: bool = False) -> None:
        migration.notes.append(Note(key, entry.line, value, text, wants_attention))

    if key == "storage_backends":
        migration.given[key] = _directories(value, path, entry.line)
        migration.remarks[key] = (
            "The same directories; what UCM stored in them isn't read, nor removed."
        )
    elif key == "store_pipeline":
        if value not in _PIPELINES:
            hint = "nothing of ours stores as that does"
            raise _error(path, entry.line, key, value, " or ".join(_PIPELINES), hint)
        migration.given[key] = value
    elif key in DEVICE_PATHS:
        if value not in (False, None):
            note("a device path, which is not built: pages go by a host buffer", True)
    elif key in FILLED_IN:
        note("filled in from SGLang's host pool")
    elif key in CONVERTED:
        _convert(migration, key, value, note)
    elif key in SAME or key in settings.SETTINGS:
        if value is None or (SAME.get(key) is not None and value == SAME[key]):
            return  # what leaving it out means
        problem = _refused(key, value)
        if problem is None:
            migration.given[key] = value
            if key == "posix_capacity_gb":
                migration.remarks[key] = (
                    "For all directories and models together; set it to the same on every host "
                    "that shares them (one of all processes evicts)."
                )
        else:
            note(problem, True)
    elif key in NO_COUNTERPART:
        note(NO_COUNTERPART[key])
    elif key.startswith(OTHER_STORES):
        note(OTHER_STORE)
    else:
        note("not a key of UCM's that is known here", True)


def _refused(key: str, value: Any) -> str | None:
    """Why a value can't be had; None if it can."""
    row = settings.SETTINGS[key]
    try:
        row.metadata["kind"].parse(key, value, row.metadata["unit"], {})
    except ConfigError as error:
        return f"allowed here is {error.allowed}" + (f" ({error.hint})" if error.hint else "")
    return None


def _directories(value: Any, path: str, line: int) -> list[str]:
    """As UCM's connector reads them: paths between colons, as they are; empty ones are nothing."""
    allowed = "absolute paths, in one string with ':' between them, or a list"
    entries = value.split(":") if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(each, str) for each in entries):
        raise _error(path, line, "storage_backends", value, allowed)
    entries = [each for each in entries if each]
    if not entries:
        raise _error(path, line, "storage_backends", value, allowed, "it is empty")
    for each in entries:
        if not each.startswith("/"):
            hint = f"{each!r} is relative: SGLang's processes need not have one working directory"
            raise _error(path, line, "storage_backends", value, allowed, hint)
    given = [each.replace("$", "$$") for each in entries]  # `$` stands for itself there
    try:
        settings.load({"storage_backends": given}, {})
    except ConfigError as error:
        raise _error(path, line, "storage_backends", value, allowed, error.hint) from None
    return given


def _convert(migration: Migration, key: str, value: Any, note: Any) -> None:
    if key == "posix_data_trans_concurrency":
        if type(value) is not int or value < 1:
            note("not a number of threads", True)
            return
        for ours in ("posix_load_worker_number", "posix_dump_worker_number"):
            migration.given[ours] = min(value, 256)
            migration.remarks[ours] = (
                f"From {key}: {value}, which were threads for both directions; our default is "
                f"{settings.SETTINGS[ours].default} for each, of every rank."
            )
    elif type(value) not in (int, float) or not 0 < value <= 1:
        note("not a ratio above 0 and up to 1", True)


def _watermarks(migration: Migration, connector: dict[str, _Entry]) -> None:
    """UCM begins at a ratio of the capacity and removes a ratio of what is there."""

    def ratio(key: str, default: float) -> float:
        entry = connector.get(key)
        good = entry is not None and type(entry.value) in (int, float) and 0 < entry.value <= 1
        return entry.value if good else default

    keys = [key for key in CONVERTED if key.startswith("posix_gc_") and key in connector]
    if not keys:
        if "posix_capacity_gb" in migration.given:
            migration.remarks["posix_capacity_gb"] += " Eviction begins at 97 % of it, not at 70 %."
        return
    high = ratio("posix_gc_trigger_threshold_ratio", 0.7)
    low = high * (1 - ratio("posix_gc_recycle_percent", 0.1))
    migration.given["posix_high_watermark_percent"] = max(1, round(high * 100))
    migration.given["posix_low_watermark_percent"] = max(1, round(low * 100))
    migration.remarks["posix_high_watermark_percent"] = f"From {' and '.join(keys)}."


def _of_the_engine(migration: Migration, key: str, entry: _Entry) -> None:
    """A key beside the connector's."""
    value = _plain(entry)
    if key in DYNAMIC_KEYS:
        text = "of SGLang's dynamic backend: --hicache-storage-backend cachestore needs none of it"
        migration.notes.append(Note(key, entry.line, value, text))
    elif key in settings.SGLANG_KEYS:
        migration.given[key] = value
        migration.remarks[key] = (
            "SGLang's own: it reads this where the file is given with "
            "--hicache-storage-backend-extra-config, not where CACHESTORE_CONFIG names it."
        )
    elif key in NO_COUNTERPART:
        migration.notes.append(Note(key, entry.line, value, NO_COUNTERPART[key]))
    else:
        text = "not a key of UCM's that is known here"
        migration.notes.append(Note(key, entry.line, value, text, True))
