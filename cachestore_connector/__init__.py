"""CacheStore: an L3 storage backend for SGLang HiCache.

Importing this imports neither sglang nor torch. SGLang finds the plugin by its entry point
(`cachestore_connector.plugin`) and, through it or through its own ``dynamic`` backend, the class
``cachestore_connector.backend.CacheStore``.
"""

from __future__ import annotations

from .config import Config, load
from .errors import CacheStoreError, ConfigError, StoreError
from .identity import Identity

__all__ = ["CacheStoreError", "Config", "ConfigError", "Identity", "StoreError", "load"]
