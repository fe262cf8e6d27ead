"""Real SGLang host pools on the CPU, over device buffers as small as they may be."""

import contextlib

import torch

PAGE = 16

# Layouts in which SGLang has a flat page of every KV pool.
FLAT_LAYOUTS = ("page_first", "page_first_direct", "layer_first")

# Every layout that SGLang 0.5.23 has a name for.
LAYOUTS = (*FLAT_LAYOUTS, "page_head", "page_unified", "page_first_kv_split")


@contextlib.contextmanager
def host_budget():
    # SGLang keeps 10 GB of host memory free; a small machine has less, and these need kilobytes.
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    with host_memory_budget_scope(1 << 30):
        yield


def mha_info(*, layers=3, heads=2, dim=8, v_dim=None, dtype=torch.bfloat16, page_size=PAGE,
             scales=None):  # fmt: skip
    """What a device pool of one page tells SGLang's host pools of itself."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo

    v_dim = v_dim or dim

    def buffers(width):
        return tuple(torch.zeros(page_size, heads, width, dtype=dtype) for _ in range(layers))

    def pointers(tensors):
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)

    k, v = buffers(dim), buffers(v_dim)
    return MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
        device=torch.device("cpu"),
        scales=scales,
    )


def mha_pool(*, layout="page_first_direct", layers=3, pages=8, page_size=PAGE, fill=None, drafts=0,
             head_groups=1, **geometry):  # fmt: skip
    """The host pool of `mha_info`, of the class that SGLang takes: ``pages`` pages or more.

    ``fill``: a seed for random bytes. ``drafts``: layers of a draft model, packed after the rest.
    """
    from sglang.srt.mem_cache.pool_host import mha

    info = mha_info(layers=layers, page_size=page_size, **geometry)
    draft = [mha_info(layers=1, page_size=page_size, **geometry) for _ in range(drafts)]
    with host_budget():
        pool = mha.get_mha_host_pool_cls(info)(
            info, 1.0, 0, page_size, layout, pin_memory=False,
            device_capacity_tokens=page_size, start_layer=0, end_layer=layers,
            draft_buffer_infos=draft, head_group_num=head_groups,
            host_token_capacity=pages * page_size,
        )  # fmt: skip
    return filled(pool, fill)


def mla_pool(*, layout="page_first_direct", layers=3, rank=12, rope=4, dtype=torch.bfloat16,
             page_size=PAGE, pages=8, fill=None, drafts=0, row=None, **host):  # fmt: skip
    """An MLATokenToKVPoolHost of at least ``pages`` pages.

    ``row``: elements of a token's row, of a packed FP8 format; ``drafts``: as in `mha_pool`.
    """
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo

    def info(layers):
        width = row or rank + rope
        buffers = tuple(torch.zeros(page_size, 1, width, dtype=dtype) for _ in range(layers))
        return MLABufferInfo(
            buffers=buffers,
            data_ptrs=torch.tensor([t.data_ptr() for t in buffers], dtype=torch.uint64),
            layer_indices=tuple(range(layers)),
            device_layer_num=layers,
            page_size=page_size,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            kv_cache_dim=width,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    host |= {"draft_buffer_infos": [info(1) for _ in range(drafts)]}
    pool = _mla_host(info(layers), layout, layers, pages, override_kv_cache_dim=row, **host)
    return filled(pool, fill)


def _mla_host(info, layout, layers, pages, page_size=None, **host):
    """The host pool of an MLABufferInfo."""
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    page_size = page_size or info.page_size
    with host_budget():
        return MLATokenToKVPoolHost(
            info, 1.0, 0, page_size, layout, pin_memory=False,
            device_capacity_tokens=page_size, start_layer=0, end_layer=layers,
            target_layer_num=layers, host_token_capacity=pages * page_size, **host,
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
    return filled(_mla_host(info, "page_first_kv_split", layers, pages), fill)


# Where host pools keep their pages: a tensor, or several.
_BUFFERS = ("k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer", "kv_buffer",
            "index_k_with_scale_buffer", "temporal_buffer", "conv_buffer", "slot_state_buffers",
            "k_scale_host", "v_scale_host")  # fmt: skip


def buffers(pool):
    """The tensors that hold a pool's pages, each once, in the order of a page's tensors."""
    held = {}
    for name in _BUFFERS:
        if name == "v_buffer" and getattr(pool, "dsa_kv_cache_store_fp8", False):
            continue  # all is in K's rows, and SGLang doesn't store it
        found = vars(pool).get(name)
        for buffer in found if isinstance(found, (list, tuple)) else [found]:
            if buffer is not None and buffer.numel():
                held.setdefault(buffer.data_ptr(), buffer)
    return list(held.values())


def filled(pool, seed):
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in buffers(pool):
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
        parts = [buffer[number].contiguous().view(torch.uint8).ravel() for buffer in buffers(pool)]
        return torch.cat(parts)
    flat = pool.get_data_page(number * pool.page_size, flat=True)
    return flat.contiguous().view(torch.uint8).clone()
