"""Real SGLang host pools on the CPU, over device buffers as small as they may be."""

import contextlib

import torch

PAGE = 16

# Layouts in which SGLang has a flat page.
FLAT_LAYOUTS = ("page_first", "page_first_direct", "layer_first")


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
    return _filled(_mla_host(info, layout, layers, pages), fill)


def _mla_host(info, layout, layers, pages):
    """The host pool of an MLABufferInfo."""
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    with _host_budget():
        return MLATokenToKVPoolHost(
            info, 1.0, 0, info.page_size, layout, pin_memory=False,
            device_capacity_tokens=info.page_size, start_layer=0, end_layer=layers,
            target_layer_num=layers, host_token_capacity=pages * info.page_size,
        )  # fmt: skip


# What a page of ``page_first_kv_split`` may hold, as arguments of `split_pool`.
SPLITS = {
    "kv": {},
    "kv-index": {"index": 8},
    "kv-index-scale": {"index": 8, "scale": True},
    "fp8": {"packed_fp8": True},
    "fp8-index-scale": {"packed_fp8": True, "index": 8, "scale": True},
}


def split_pool(*, layers=3, rank=12, rope=4, index=None, scale=False, index_layers=None,
               packed_fp8=False, page_size=PAGE, pages=8, fill=None):  # fmt: skip
    """An MLATokenToKVPoolHost in ``page_first_kv_split``, as on Ascend: ``pages`` pages or more.

    ``index``: width of index_k's rows, of ``index_layers`` of the layers; ``scale``: with scales;
    ``packed_fp8``: K holds it all, and V nothing.
    """
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo, MLASplitBuffers

    dtype = torch.float8_e4m3fn if packed_fp8 else torch.bfloat16
    k_width = rank + rope + 3 if packed_fp8 else rank
    index_layers = index_layers if index_layers is not None else layers - 1
    rows = (1, page_size, 1)

    def native(count, width, of=dtype):
        return torch.zeros(count, *rows, width, dtype=of)

    info = MLABufferInfo(
        buffers=MLASplitBuffers(
            k=native(layers, k_width),
            v=native(layers, 0 if packed_fp8 else rope),
            index_k=None if index is None else native(index_layers, index),
            index_scales=native(index_layers, 1, torch.float32) if scale else None,
            index_layer_indices=tuple(range(index_layers)),
            k_width=k_width,
            v_width=rope,
            index_width=index or 0,
        ),
        data_ptrs=None,
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_size,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=dtype,
        device=torch.device("cpu"),
        packed_fp8=packed_fp8,
    )
    return _filled(_mla_host(info, "page_first_kv_split", layers, pages), fill)


def _buffers(pool):
    """The tensors that hold a pool's pages, in the order of a page's tensors."""
    if pool.layout != "page_first_kv_split":
        return [pool.kv_buffer]
    v = None if pool.dsa_kv_cache_store_fp8 else pool.v_buffer
    return [
        buffer
        for buffer in (pool.k_buffer, v, pool.index_k_buffer, pool.index_k_scale_buffer)
        if buffer is not None
    ]


def _filled(pool, seed):
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in _buffers(pool):
            raw = buffer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    return pool


def indices(pool, pages):
    """Host indices of the given page numbers, as SGLang passes them."""
    return torch.cat(
        [torch.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in pages]
        or [torch.empty(0, dtype=torch.int64)]
    )


def page_bytes(pool, number):
    """A page's bytes as SGLang itself flattens it: independent of addresses and of our code.

    Split pools, which SGLang can't flatten: the page of each buffer, one after another.
    """
    if pool.layout == "page_first_kv_split":
        parts = [buffer[number].contiguous().view(torch.uint8).ravel() for buffer in _buffers(pool)]
        return torch.cat(parts)
    flat = pool.get_data_page(number * pool.page_size, flat=True)
    return flat.contiguous().view(torch.uint8).clone()
