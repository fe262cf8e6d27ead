"""Real SGLang host pools on the CPU, over device buffers as small as they may be."""

import contextlib

import torch

PAGE = 16


@contextlib.contextmanager
def _host_budget():
    # SGLang keeps 10 GB of host memory free; a small machine has less, and these need kilobytes.
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    with host_memory_budget_scope(1 << 30):
        yield


def mha_pool(*, layout="page_first_direct", layers=3, heads=2, dim=8, v_dim=None,
             dtype=torch.bfloat16, page_size=PAGE, pages=8, fill=None):  # fmt: skip
    """An MHATokenToKVPoolHost of at least ``pages`` pages; ``fill``: a seed for random bytes."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host import mha

    v_dim = v_dim or dim
    tokens = page_size

    def buffers(width):
        return tuple(torch.zeros(tokens, heads, width, dtype=dtype) for _ in range(layers))

    def pointers(tensors):
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)

    k, v = buffers(dim), buffers(v_dim)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    kind = mha.MHATokenToKVPoolHost if v_dim == dim else mha.AsymmetricMHATokenToKVPoolHost
    with _host_budget():
        pool = kind(
            info, 1.0, 0, page_size, layout, pin_memory=False,
            device_capacity_tokens=tokens, start_layer=0, end_layer=layers,
            host_token_capacity=pages * page_size,
        )  # fmt: skip
    return _filled(pool, fill)


def mla_pool(*, layout="page_first_direct", layers=3, rank=12, rope=4, dtype=torch.bfloat16,
             page_size=PAGE, pages=8, fill=None):  # fmt: skip
    """An MLATokenToKVPoolHost of at least ``pages`` pages."""
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    tokens = page_size
    buffers = tuple(torch.zeros(tokens, 1, rank + rope, dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([t.data_ptr() for t in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_size,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with _host_budget():
        pool = MLATokenToKVPoolHost(
            info, 1.0, 0, page_size, layout, pin_memory=False,
            device_capacity_tokens=tokens, start_layer=0, end_layer=layers,
            target_layer_num=layers, host_token_capacity=pages * page_size,
        )  # fmt: skip
    return _filled(pool, fill)


def _filled(pool, seed):
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        raw = pool.kv_buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    return pool


def indices(pool, pages):
    """Host indices of the given page numbers, as SGLang passes them."""
    return torch.cat(
        [torch.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in pages]
        or [torch.empty(0, dtype=torch.int64)]
    )


def page_bytes(pool, number):
    """A page's bytes as SGLang itself flattens it: independent of addresses and of our code."""
    flat = pool.get_data_page(number * pool.page_size, flat=True)
    return flat.contiguous().view(torch.uint8).clone()
