"""How much CacheStore says, by the environment variable ``CACHESTORE_LOG_LEVEL``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

VARIABLE = "CACHESTORE_LOG_LEVEL"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

logger = logging.getLogger("cachestore")

_applied = ""


def apply(environ: Mapping[str, str] = os.environ) -> None:
    """Set the level of our logger alone, whatever SGLang's is; where none is given, leave it.

    A word that isn't a level is said so, and leaves it too.
    """
    global _applied
    given = environ.get(VARIABLE, "").strip()
    if given == _applied:  # by the plugin, or at an attach before
        return
    _applied = given
    if not given:
        return
    level = LEVELS.get(given.lower())
    if level is None:
        allowed = ", ".join(LEVELS)
        logger.warning("CacheStore: %s = %r: allowed is one of %s", VARIABLE, given, allowed)
        return
    logger.setLevel(level)
