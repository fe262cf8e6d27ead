"""Setting the loader's methods on SGLang's classes, in place, or saying why not.

In place, because subclasses and by-name imports then have them too. Called by the plugin in each of
SGLang's processes before anything is constructed. With the switch off the hooks are set all the
same, and SGLang does what it did: the switch is read when a controller is constructed.
"""

from __future__ import annotations

import logging

from sglang.srt.environ import EnvBool, Envs
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from . import controller, known_code, layer_events, lifecycle, tree
from .wrapping import wrap

logger = logging.getLogger("cachestore")

SWITCH = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"


def install() -> bool:
    """Set the hooks; whether they are set. What is wrong is logged, in one line, if it matters."""
    base = cache_controller.HiCacheController
    if _is_ours(base):
        return True
    if hasattr(Envs, SWITCH) or hasattr(base, "_init_load_enqueue_thread"):
        logger.info("CacheStore: this SGLang has %s itself; ours steps aside", SWITCH)
        return False
    switch = EnvBool(False)
    switch.name = SWITCH  # __set_name__ is for class bodies
    wanted = switch.get()
    misfits = known_code.misfits()
    if misfits:
        logger.log(
            logging.ERROR if wanted else logging.DEBUG,
            "CacheStore: %s stays off, load-backs are enqueued inline: this SGLang isn't the one "
            "it was made for (%s), which differs in %s",
            SWITCH,
            known_code.SGLANG,
            ", ".join(misfits),
        )
        return False
    setattr(Envs, SWITCH, switch)

    hybrid = hybrid_cache_controller.HybridCacheController
    _set_methods(layer_events.LayerLoadingEvent, cache_controller.LayerLoadingEvent)
    _set_methods(layer_events.LayerDoneCounter, cache_controller.LayerDoneCounter)
    _set_methods(controller.HiCacheController, base)
    wrap(base, "__init__", lifecycle.controller_init)
    wrap(base, "reset", lifecycle.reset)
    wrap(base, "has_inflight_device_transfers", lifecycle.has_inflight_device_transfers)
    wrap(base, "detach_storage_backend", lifecycle.detach_storage_backend)
    wrap(hybrid, "__init__", lifecycle.hybrid_init)
    wrap(UnifiedRadixCache, "loading_check", tree.loading_check)
    wrap(UnifiedRadixCache, "is_load_back_event_done", tree.is_load_back_event_done)
    wrap(UnifiedRadixCache, "has_free_load_back_slot", tree.has_free_load_back_slot)
    wrap(UnifiedRadixCache, "release_host_resources", tree.stop_first)
    wrap(UnifiedRadixCache, "shutdown", tree.stop_first)
    return True


def _is_ours(base: type) -> bool:
    method = getattr(base, "_init_load_enqueue_thread", None)
    return method is controller.HiCacheController._init_load_enqueue_thread


def _set_methods(ours: type, theirs: type) -> None:
    """Give SGLang's class the functions of ours."""
    for name, value in vars(ours).items():
        if callable(value):
            setattr(theirs, name, value)
