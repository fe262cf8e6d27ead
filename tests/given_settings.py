"""What the tests of settings share: an environment, a refusal, a settings file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachestore_connector.config import load
from cachestore_connector.errors import ConfigError

ENV = {"HOME": "/home/u"}


def refused(extra: Any, *parts: str, environ: dict[str, str] = ENV) -> ConfigError:
    """The error of load(extra), after checking that each of parts is in its message."""
    with pytest.raises(ConfigError) as caught:
        load(extra, environ)
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def settings_file(tmp_path: Path, text: str, name: str = "c.yaml") -> dict[str, str]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return ENV | {"CACHESTORE_CONFIG": str(path)}
