"""SGLang's host pools on the CPU, filled with random bytes.

A host pool is built as `hybrid_pool_assembler` builds it, from the buffers of a real device pool
(which is on the CPU here, and as small as it can be: only its geometry matters). The one
difference is ``pin_memory=False``, since pinning calls the CUDA runtime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from .cases import PAGE_TOKENS, CacheCase, Case, Model

LAYOUT = "page_first_direct"
_KV_LORA_RANK = 512


class HostPages:
    """A host pool whose first half is dumped, and whose second half is loaded into.

    ``pool``: the `HostKVCache`. ``source``, ``target``: the token slots of the halves, as its
    ``alloc`` gave them. ``source_tensors``, ``target_tensors``: per page, the bytes of each of
    its tensors as writable uint8 arrays, in the order of ``get_page_buffer_meta``.
    """

    def __init__(self, case: Case | CacheCase) -> None:
        """Allocate and fill it: `pool_pages` pages."""
        self.pool = _host_pool(case.model, pool_pages(case))
        self._bytes = self.pool.kv_buffer.view(torch.uint8).numpy().reshape(-1)
        words = self._bytes.view(np.uint64)
        generator = np.random.Generator(np.random.SFC64(seed=7))
        for start in range(0, len(words), 1 << 20):
            piece = words[start : start + (1 << 20)]
            piece[:] = generator.integers(0, 1 << 64, len(piece), dtype=np.uint64)
        self.source = self.pool.alloc(case.pages * PAGE_TOKENS)
        self.target = self.pool.alloc(case.pages * PAGE_TOKENS)
        self.source_tensors = self._tensors(self.source)
        self.target_tensors = self._tensors(self.target)
        if sum(len(tensor) for tensor in self.source_tensors[0]) != case.model.page_bytes:
            raise AssertionError(f"a page of the host pool hasn't {case.model.page_bytes} bytes")

    def _tensors(self, indices: torch.Tensor) -> list[list[np.ndarray]]:
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        base = self.pool.kv_buffer.data_ptr()
        flat = [
            self._bytes[address - base : address - base + size]
            for address, size in zip(addresses, sizes, strict=True)
        ]
        pages = len(indices) // PAGE_TOKENS
        per_page = len(flat) // pages
        return [flat[page * per_page : (page + 1) * per_page] for page in range(pages)]

    def spoil_target(self) -> None:
        """Make every target page differ from its source page, in every byte."""
        for source, target in zip(self.source_tensors, self.target_tensors, strict=True):
            for from_bytes, to_bytes in zip(source, target, strict=True):
                np.invert(from_bytes, out=to_bytes)

    def wrong_pages(self) -> list[int]:
        """Numbers of the pages whose target isn't byte-equal to its source."""
        return [
            number
            for number, (source, target) in enumerate(
                zip(self.source_tensors, self.target_tensors, strict=True)
            )
            if not all(
                np.array_equal(from_bytes, to_bytes)
                for from_bytes, to_bytes in zip(source, target, strict=True)
            )
        ]


def pool_pages(case: Case | CacheCase) -> int:
    """Pages of the host pool: two halves, and no fewer than SGLang's MLA pool can have.

    (Its per-layer views of this layout take one page for each layer.)
    """
    return max(2 * case.pages, case.model.layers)


def _host_pool(model: Model, pages: int) -> Any:
    """A host pool of exactly ``pages`` pages.

    SGLang leaves 10 GB of the host's memory free; the runner has checked what is free here.
    """
    device = {
        "size": PAGE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": torch.bfloat16,
        "layer_num": model.layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    host = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE_TOKENS,
        "layout": LAYOUT,
        "pin_memory": False,
        "device_capacity_tokens": PAGE_TOKENS,
        "host_token_capacity": pages * PAGE_TOKENS,
        "start_layer": 0,
        "end_layer": model.layers,
    }
    with host_memory_budget_scope(pages * model.page_bytes):
        if model.is_mla:
            rope = model.dim - _KV_LORA_RANK
            pool = MLATokenToKVPool(kv_lora_rank=_KV_LORA_RANK, qk_rope_head_dim=rope, **device)
            info = pool.get_device_pool_infos()[0].buffer_info
            return MLATokenToKVPoolHost(info, target_layer_num=model.layers, **host)
        pool = MHATokenToKVPool(head_num=model.heads, head_dim=model.dim, **device)
        info = pool.get_device_pool_infos()[0].buffer_info
        return MHATokenToKVPoolHost(info, **host)
