"""The code of SGLang 0.5.23 that the loader's hooks replace, wrap or rely on, by digest.

Where a later SGLang differs in any of it, the hooks aren't set: what they assume may not hold.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect

SGLANG = "0.5.23"

_CONTROLLER = "sglang.srt.managers.cache_controller"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_TREE = "sglang.srt.mem_cache.unified_radix_cache"
_ENGINE = "sglang.srt.mem_cache.l2_transfer"

#: (module, class or class.method) -> the start of its source's SHA-256.
DIGESTS: dict[tuple[str, str], str] = {
    (_CONTROLLER, "LayerLoadingEvent"): "14680b68638dc9fe",
    (_CONTROLLER, "LayerLoadingEvent.__init__"): "c24c892d9d437882",
    (_CONTROLLER, "LayerLoadingEvent.complete"): "f028c5281f442d90",
    (_CONTROLLER, "LayerLoadingEvent.wait"): "6f2d7033e2cda24d",
    (_CONTROLLER, "LayerDoneCounter"): "54f4bc277d7b6083",
    (_CONTROLLER, "LayerDoneCounter.__init__"): "a8bb359bdc78c62b",
    (_CONTROLLER, "LayerDoneCounter.update_producer"): "283025c9b80c80ad",
    (_CONTROLLER, "LayerDoneCounter.wait_until"): "82ca799b977847f4",
    (_CONTROLLER, "HiCacheAck"): "92f73ad16e4ea31d",
    (_CONTROLLER, "CacheOperation.merge_ops"): "d913359419ee3a76",
    (_CONTROLLER, "HiCacheController.__init__"): "fcaefe28faae925d",
    (_CONTROLLER, "HiCacheController.start_loading"): "3120806593e5e17e",
    (_CONTROLLER, "HiCacheController.reset"): "d01e8bf80bdbfbc5",
    (_CONTROLLER, "HiCacheController.has_inflight_device_transfers"): "918b883159844ec9",
    (_CONTROLLER, "HiCacheController.detach_storage_backend"): "effaec7565762843",
    (_HYBRID, "HybridCacheController.__init__"): "242bdf941e6e1104",
    (_HYBRID, "HybridCacheController.reset"): "d7a1d2d9ce43a4b5",
    (_HYBRID, "HybridCacheController.detach_storage_backend"): "7243c4d08970fc9e",
    (_TREE, "UnifiedRadixCache._count_ready_acks"): "d8acb377dd25453d",
    (_TREE, "UnifiedRadixCache.has_free_load_back_slot"): "c3bafef398d53687",
    (_TREE, "UnifiedRadixCache.is_load_back_event_done"): "5e3f0127f8faae74",
    (_TREE, "UnifiedRadixCache.loading_check"): "79f49c6855d1a23d",
    (_TREE, "UnifiedRadixCache.ready_to_load_host_cache"): "80fd407e99c2ecec",
    (_TREE, "UnifiedRadixCache.release_host_resources"): "860c51970de839a6",
    (_TREE, "UnifiedRadixCache.shutdown"): "9ad08230d539baf7",
    (_ENGINE, "L2TransferEngine._submission"): "6a1f5ebd7878704b",
    (_ENGINE, "L2TransferEngine.submit_host_to_device"): "876a0b5d6dc6ae33",
}


def digest(module: str, path: str) -> str:
    """The digest of a class's or function's source; TypeError for another's wrapper of it."""
    target = importlib.import_module(module)
    for name in path.split("."):
        target = inspect.getattr_static(target, name)
    if inspect.isfunction(target) and target.__globals__["__name__"] not in (module, "contextlib"):
        raise TypeError(f"{path} is wrapped")
    return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()[:16]


def misfits() -> list[str]:
    """Names of what isn't as known: changed, wrapped, gone, or without source."""
    found = []
    for (module, path), known in DIGESTS.items():
        try:
            fits = digest(module, path) == known
        except (ImportError, AttributeError, OSError, TypeError):
            fits = False
        if not fits:
            found.append(path)
    return found
