"""Sliding-window layers on the CPU: ``torch_native`` reads them where it has written them.

A hybrid model's sliding-window (SWA) layers have a pool of their own, smaller than that of the full
layers, and a map from a token's slot there to its slot here. SGLang 0.5.23's ``torch_native``
attention writes through the map and then reads the same layers at the untranslated slots: output
that depends on whatever lies there. (``intel_amx`` translates, but needs a kernel package.) So the
hook translates what such a layer reads. A slot that is no longer mapped gives slot 0, which the
window masks.

Of any other ``torch_native`` the hook knows nothing: it may translate by itself. A server with such
a pool then fails at its first forward, instead of answering with another model's output.
"""

import hashlib
import inspect

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
#: The start of its source's SHA-256.
_KNOWN = "c681bb928dd710ad"


def install() -> None:
    """Hook SGLang; models without such layers go on as before."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    source = inspect.getsource(TorchNativeAttnBackend).encode()
    hook = _translated if hashlib.sha256(source).hexdigest().startswith(_KNOWN) else _refused
    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{_BACKEND}.{name}", hook, HookType.AROUND)


class _Translated:
    """``req_to_token``, but what is taken out of it are slots of the SWA pool."""

    def __init__(self, table, pool):
        self._table, self._pool = table, pool

    @property
    def req_to_token(self):
        return self

    def __getitem__(self, where):
        return self._pool.translate_loc_from_full_to_swa(self._table[where])


def _translated(original, backend, q, k, v, layer, *args, **kwargs):
    pool = backend.token_to_kv_pool
    if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
        return original(backend, q, k, v, layer, *args, **kwargs)
    requests = backend.req_to_token_pool
    backend.req_to_token_pool = _Translated(requests.req_to_token, pool)
    try:
        return original(backend, q, k, v, layer, *args, **kwargs)
    finally:
        backend.req_to_token_pool = requests


def _refused(original, backend, *args, **kwargs):
    if getattr(backend, "use_sliding_window_kv_pool", True):
        raise RuntimeError(
            f"the rig doesn't know this SGLang's {_BACKEND}: see whether it reads sliding-window "
            "layers at translated slots by now"
        )
    return original(backend, *args, **kwargs)
