"""A test-only SGLang plugin: the real server runs HiCache on a machine without a GPU.

It replaces only what needs a CUDA runtime, each with its reason below; the scheduler, the radix
tree, the HiCache controller and its threads, the host pools and the storage path are SGLang's own.
Without ``CACHESTORE_RIG=1`` in the environment it does nothing, so having it installed beside
SGLang changes nothing else. Pinned to SGLang 0.5.23: a target that moved raises, SGLang logs it,
and the server then fails at its first CUDA call.
"""

import hashlib
import os
import sys
import types
from array import array

import cachestore_rig_loads
import cachestore_rig_windows


def install() -> None:
    """The entry point: SGLang calls it in each of its processes before it parses flags."""
    if os.environ.get("CACHESTORE_RIG") != "1":
        return
    _keep_host_pages_unpinned()
    _copy_pages_with_torch()
    _hash_with_hashlib()
    _absorb_mla()
    _stub_vllm()
    _disable_nccl()
    _rest_when_idle()
    cachestore_rig_windows.install()
    cachestore_rig_loads.install()


def _keep_host_pages_unpinned() -> None:
    """Pinning host memory calls the CUDA runtime."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def unpinned(original, *args, **kwargs):
        kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", unpinned, HookType.AROUND
    )


def _copy_pages_with_torch() -> None:
    """The page copies of the ``direct`` I/O backend are CUDA kernels; these are their meaning."""
    from sglang.srt.mem_cache.pool_host import mha, mla

    for module in (mha, mla):
        module.transfer_kv_per_layer_direct_pf_lf = _host_pages_to_layer
        module.transfer_kv_all_layer_direct_lf_pf = _layers_to_host_pages
        module.transfer_kv_direct = _layer_to_layer


def _host_pages_to_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Load-back of one layer: host ``[page, layer, token, ...]`` to device ``[token, ...]``."""
    page, token = src_indices // page_size, src_indices % page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[page, layer_id, token]


def _layers_to_host_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Backup of all layers; ``src_ptrs`` holds the layers of each host buffer one after another."""
    page, token = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, device in enumerate(src_ptrs):
        host = dst_ptrs[i // layers]
        host[page, i % layers, token] = device[src_indices]


def _layer_to_layer(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Both directions of the ``layer_first`` layout."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def _hash_with_hashlib() -> None:
    """SGLang compiles its page hash at the first request, which needs OpenSSL's headers and 20 s.

    Same keys: those of a backup are made elsewhere, in SGLang's radix tree, so a storage hit on
    the rig means that both agree.
    """
    from sglang.srt.mem_cache.cpp_utils import native_hash

    module = types.SimpleNamespace(get_hash=_page_hashes)
    native_hash._load_native_hash_module = lambda: module


def _page_hashes(raw, logical_len, unit_width, is_bigram, prior_digest, page_size=None):
    """Chained SHA-256 over little-endian 32-bit token ids: one hash, or one per page."""
    if is_bigram:
        raise NotImplementedError("bigram keys on the rig")
    words = array("I", raw[: logical_len * unit_width])
    step = max(page_size * unit_width if page_size else len(words), 1)
    digest, hashes = prior_digest or b"", []
    for start in range(0, len(words), step):
        digest = hashlib.sha256(digest + words[start : start + step].tobytes()).digest()
        hashes.append(digest.hex())
    return hashes if page_size else hashes[0]


def _absorb_mla() -> None:
    """Without a handler the torch attention backend is given un-absorbed MLA shapes and fails."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)


def _stub_vllm() -> None:
    """Rotary embedding imports vLLM's kernel where it finds no GPU, and never calls it here."""

    def rotary_embedding(*args, **kwargs):
        raise NotImplementedError("a stand-in that the rig expects never to be called")

    package = types.ModuleType("vllm")
    package.__path__ = []
    ops = types.ModuleType("vllm._custom_ops")
    ops.rotary_embedding = rotary_embedding
    package._custom_ops = ops
    sys.modules.setdefault("vllm", package)
    sys.modules.setdefault("vllm._custom_ops", ops)


def _disable_nccl() -> None:
    """With tp > 1 SGLang opens NCCL beside gloo; there is no device for it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def disabled(self, group, device, *args, **kwargs):
        self.group, self.device = group, device
        self.available, self.disabled = False, True

    HookRegistry.register(
        "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__",
        disabled,
        HookType.REPLACE,
    )


def _rest_when_idle() -> None:
    """An idle scheduler spins, so a few servers on two cores would starve each other.

    With ``--sleep-on-idle`` SGLang waits a whole second between rounds, which would delay backups;
    5 ms leaves them prompt.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep",
        lambda self: self.poller.poll(5),
        HookType.REPLACE,
    )
