"""Reading a settings file: YAML, or JSON by its suffix, with the line of each key.

A key that is given twice is refused: both parsers would quietly take the last one.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from .errors import ConfigError

_ALLOWED = "the path of a readable YAML or JSON file (UTF-8) with a mapping of settings in it"


def read_config_file(variable: str, path: str) -> tuple[dict[Any, Any], dict[Any, str]]:
    """(settings, line of each key as `` line N``) of the file at ``path``.

    ``variable``: the environment variable that named the file, for the message. A file that is
    empty, or all comments, has no settings. JSON has no lines. Raises `ConfigError`.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(variable, path, _ALLOWED, hint=_reason(error)) from None
    try:
        if path.endswith(".json"):
            return _read_json(text), {}
        return _read_yaml(text)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        # The last three are PyYAML's, for an explicit tag on a value that isn't of its kind.
        raise ConfigError(variable, path, _ALLOWED, hint=_reason(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(variable, path, _ALLOWED, hint=_yaml_reason(error, text)) from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _yaml_reason(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"line {line}: the character {chr(error.character)!r} is not allowed in YAML"
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + (getattr(error, "problem", None) or " ".join(str(error).split()))


def _read_json(text: str) -> dict[Any, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice!r} is given twice")
        return mapping

    settings = json.loads(text, object_pairs_hook=without_duplicates)
    if not isinstance(settings, dict):
        raise ValueError(f"it holds a {type(settings).__name__}, not a mapping")
    return settings


def _read_yaml(text: str) -> tuple[dict[Any, Any], dict[Any, str]]:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"line {node.start_mark.line + 1}: it is a {node.id}, not a mapping")
        settings: dict[Any, Any] = {}
        lines: dict[Any, str] = {}
        for key_node, value_node in node.value:
            line = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"{line}: a key must be a plain word")
            key = loader.construct_object(key_node, deep=True)
            if key in settings:
                raise ValueError(f"{line}: the key {key!r} is given twice (first:{lines[key]})")
            settings[key] = loader.construct_object(value_node, deep=True)
            lines[key] = f" {line}"
        return settings, lines
    finally:
        loader.dispose()
