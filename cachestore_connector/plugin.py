"""The SGLang plugin: what is hooked, and why.

SGLang loads it by the entry point ``sglang.srt.plugins`` in the launcher, every scheduler and its
other processes, before arguments are parsed. SGLang only logs a plugin or hook that fails and goes
on without it, so everything is checked here: what is to be hooked, before; that it is hooked, when
the first hook runs. Without the hooks, the backend works through SGLang's own ``dynamic`` backend
(README).
"""

from __future__ import annotations

import argparse
import contextvars
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from . import log_level, weights
from .errors import CacheStoreError

logger = logging.getLogger("cachestore")

NAME = "cachestore"
_OPTION = "--hicache-storage-backend"

_ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
_CREATE = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._do_create_backend"
_ATTACH = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
_STORAGE_CONFIG = "sglang.srt.managers.cache_controller.HiCacheController._generate_storage_config"
_SHOULD_BACKUP = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.should_backup"
)
_WEIGHTS = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.flush_cache_after_weight_update"
)

# What each hook relies on: the parameters it uses, by name and in this order.
_PARAMETERS = {
    _ADD_CLI_ARGS: ["parser"],
    _CREATE: ["backend_name", "storage_config", "mem_pool_host"],
    _ATTACH: ["self", "storage_backend"],
    _STORAGE_CONFIG: ["self"],
    _SHOULD_BACKUP: ["self", "transfer"],
    _WEIGHTS: ["self", "recv_req"],
}

INSTEAD = (
    "this SGLang isn't one that CacheStore's plugin knows (0.5.23). Try SGLang's own way instead: "
    "--hicache-storage-backend dynamic --hicache-storage-backend-extra-config "
    '\'{"backend_name": "cachestore", "module_path": "cachestore_connector.backend", '
    '"class_name": "CacheStore", "interface_v1": 1}\''
)

# While our backend is attached: the host pools that it will be told of, (name, pool).
_attaching: contextvars.ContextVar[list[tuple[str, Any]] | None] = contextvars.ContextVar(
    "attaching", default=None
)


def register() -> None:
    """Register the hooks; called by SGLang. One loud error, and no hook, if one doesn't fit."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    log_level.apply()
    _install_async_load()
    misfits = [problem for target in _PARAMETERS if (problem := _misfit(target))]
    if misfits:
        logger.error("CacheStore: %s; %s", "; ".join(misfits), INSTEAD)
        return
    # argparse knows the names of SGLang's own backends only.
    HookRegistry.register(_ADD_CLI_ARGS, _offer_choice, HookType.AFTER)
    # The factory constructs its own names only, whatever is registered with it.
    HookRegistry.register(_CREATE, _create_backend, HookType.AROUND)
    # SGLang chooses the zero-copy calls (batch_get_v1, batch_set_v1) by the backend's name.
    HookRegistry.register(_ATTACH, _attach, HookType.AROUND)
    # SGLang has rank 0 alone store an MLA model's KV, whichever part of it that rank holds.
    HookRegistry.register(_STORAGE_CONFIG, _storage_config, HookType.AROUND)
    # And what it takes for the same on every rank, by the pool's name.
    HookRegistry.register(_SHOULD_BACKUP, _should_backup, HookType.AROUND)
    # SGLang drops what the old weights left in L1 and L2 here, and only there.
    HookRegistry.register(_WEIGHTS, _weights_updated, HookType.BEFORE)


def _install_async_load() -> None:
    """Set the hooks of the load-back thread; they are independent of the store and its hooks."""
    try:
        from .async_load.install import install

        install()
    except Exception:
        logger.exception("CacheStore: load-backs are enqueued inline: the hooks can't be set")


def _offer_choice(result: Any, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
    """After SGLang's: add our name to the choices of its option."""
    _require_hooks()
    for action in parser._actions:
        if _OPTION in action.option_strings:
            if action.choices is not None and NAME not in action.choices:
                action.choices = [*action.choices, NAME]
            return
    raise CacheStoreError(f"CacheStore: SGLang has no option {_OPTION}; {INSTEAD}")


def _create_backend(
    original: Callable, cls: type, backend_name: str, storage_config: Any, pool: Any, **kwargs: Any
) -> Any:
    """Around SGLang's: construct our class for our name."""
    if backend_name != NAME:
        return original(cls, backend_name, storage_config, pool, **kwargs)
    host_pools = _attaching.get()
    if host_pools is None:
        raise CacheStoreError(f"CacheStore: {_ATTACH} is not hooked; {INSTEAD}")
    from .backend import CacheStore

    return CacheStore(storage_config, pool, host_pools=host_pools)


def _attach(
    original: Callable, controller: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> Any:
    """Around SGLang's: tell ours of all host pools, then choose the zero-copy calls.

    SGLang registers side pools one by one after this, where an exception leaves a half-attached
    server; what can't be served is refused here, where it is a failed attach.
    """
    if storage_backend != NAME:
        return original(controller, storage_backend, *args, **kwargs)
    _require_hooks()
    entries = getattr(controller.mem_pool_host, "entries", None) or ()
    token = _attaching.set([(str(entry.name), entry.host_pool) for entry in entries])
    try:
        result = original(controller, storage_backend, *args, **kwargs)
    finally:
        _attaching.reset(token)
    controller.page_get_func = controller._page_get_zero_copy
    controller.page_set_func = controller._page_set_zero_copy
    return result


def _storage_config(original: Callable, controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's: one of the ranks that hold the same stores it."""
    config = original(controller, *args, **kwargs)
    if controller.storage_backend_type != NAME:
        return config
    from .context_ranks import with_one_writer

    return with_one_writer(config, controller.storage_host_pool)


def _should_backup(original: Callable, controller: Any, transfer: Any) -> bool:
    """Around SGLang's: this rank stores what no other rank has."""
    if original(controller, transfer):
        return True
    if controller.storage_backend_type != NAME:
        return False
    backend = controller.storage_backend
    backend = getattr(backend, "_backend", backend)  # in SGLang's injector of failures
    return backend is not None and backend.every_rank_stores(transfer.name)


def _weights_updated(*_: Any, **__: Any) -> None:
    """Before SGLang's: the weights are others now."""
    weights.count_update()


def _misfit(target: str) -> str | None:
    """What is wrong with a target, or None."""
    try:
        function = _resolve(target)
        parameters = [name for name in inspect.signature(function).parameters if name != "cls"]
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{target} can't be hooked ({error})"
    expected = _PARAMETERS[target]
    if parameters[: len(expected)] != expected:
        return f"{target} takes {parameters}, not {expected} first"
    return None


def _require_hooks() -> None:
    """Raise unless every hook of ours is in place."""
    hooks = {
        _ADD_CLI_ARGS: _offer_choice,
        _CREATE: _create_backend,
        _ATTACH: _attach,
        _STORAGE_CONFIG: _storage_config,
        _SHOULD_BACKUP: _should_backup,
        _WEIGHTS: _weights_updated,
    }
    missing = [target for target, hook in hooks.items() if not _is_hooked(_resolve(target), hook)]
    if missing:
        raise CacheStoreError(f"CacheStore: {', '.join(missing)} not hooked; {INSTEAD}")


def _is_hooked(function: Any, hook: Callable) -> bool:
    """Whether ``hook`` is in one of the wrappers around ``function``: SGLang's close over it."""
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is hook:
                return True
        function = getattr(function, "__wrapped__", None)
    return False


def _resolve(target: str) -> Any:
    """The function at a dotted path ``package.module.Class.method``."""
    module_name, class_name, method = target.rsplit(".", 2)
    return getattr(getattr(importlib.import_module(module_name), class_name), method)
