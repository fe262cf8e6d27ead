"""Real SGLang host pools beside the KV pool, on the CPU; a KV pool of `host_pools` is the anchor.

The device pools are plain objects with what the host pools read of them. Two classes can't be
constructed without a GPU: there the object is made by hand, of the real class.
"""

from types import SimpleNamespace

import torch

from host_pools import PAGE, filled, host_budget, mha_info, mha_pool, mla_pool


def key_only_pool(*, layout, layers=3, heads=1, dim=8, dtype=torch.bfloat16, pages=8, fill=None):
    """MiniMax's index keys, without values."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

    device = SimpleNamespace(
        store_dtype=dtype, start_layer=0, end_layer=layers, layer_num=layers, head_num=heads,
        head_dim=dim, device="cpu",
        k_buffer=[torch.zeros(PAGE, heads, dim, dtype=dtype) for _ in range(layers)],
    )  # fmt: skip
    with host_budget():
        anchor = mha_pool(pages=pages)
        return filled(MHATokenToKOnlyPoolHost(device, anchor, layout, pin_memory=False), fill)


def dsa_pool(*, layout, layers=3, with_index=None, drafts=0, pages=8, fill=None):
    """Index keys and their scales; ``with_index``: the layers that have any."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo

    def device(layers):
        rows = [torch.zeros(1, PAGE * 132, dtype=torch.uint8) for _ in range(layers)]
        return SimpleNamespace(
            store_dtype=torch.bfloat16, start_layer=0, end_layer=layers, layer_num=layers,
            layer_shard_enabled=False, device="cpu", index_k_with_scale_buffer=rows,
        )  # fmt: skip

    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device(layers),
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=132, dtype=torch.uint8),
        host_pool_builder=None,
        owned_device_layers=with_index,
    )
    with host_budget():
        anchor = mla_pool(pages=pages)
        anchor.layout = layout  # also those that the anchor itself can't be built with
        pool = DSAIndexerPoolHost(
            decl, anchor, pin_memory=False,
            packed_draft_device_pools=tuple(device(1) for _ in range(drafts)),
        )  # fmt: skip
    return filled(pool, fill)


def mamba_pool(*, layout, layers=2, states=False, temporal=True, drafts=0, pages=8, fill=None):
    """Recurrent states, one a page; ``states``: with registered side states."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    def info(layers):
        extra = (torch.zeros(4, 5), torch.zeros(4, 3, dtype=torch.uint8)) if states else ()
        return MambaStateBufferInfo(
            temporal=torch.zeros(layers, 4, 2 if temporal else 0, 3),
            conv=tuple(torch.zeros(layers, 4, n, 2, dtype=torch.bfloat16) for n in (3, 5)),
            extra_checkpoint_buffers=extra,
        )

    with host_budget():
        pool = MambaPoolHost(
            info(layers), pages / 4, 0, device_capacity=4, pin_memory=False, layout=layout,
            mtp_draft_buffer_infos=[info(1) for _ in range(drafts)],
        )  # fmt: skip
    return filled(pool, fill)


def paged_pool(*, layout, layers=3, item=40, pages=8, fill=None):
    """DeepSeek-V4's compressed KV, or its sliding window."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    buffers = [torch.zeros(4, item, dtype=torch.uint8) for _ in range(layers)]
    with host_budget():
        pool = DeepSeekV4PagedHostPool(
            "c4", buffers, item, pages, PAGE, layout=layout, pin_memory=False
        )
    return filled(pool, fill)


def state_pool(*, layout, layers=3, pages=8, fill=None):
    """DeepSeek-V4's compressor states, a ring for each page of the sliding window."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool

    states = [
        SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(8, 6)), ring_size=4)
        for _ in range(layers)
    ]
    with host_budget():
        pool = DeepSeekV4StateHostPool(
            "c4_state", states, pages, PAGE, layout=layout, pin_memory=False
        )
    return filled(pool, fill)


def qsa_pool(*, layout, layers=3, drafts=0, pages=8, fill=None):
    """QSA's compressed index keys."""
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

    def device(layers):
        rows = [torch.zeros(PAGE, 2, 6, dtype=torch.bfloat16) for _ in range(layers)]
        return SimpleNamespace(qsa_compress_ratio=4, qsa_compressed_k_buffer_pool=rows)

    with host_budget():
        anchor = mha_pool(pages=pages)
        anchor.layout = layout
        pool = QSAIndexerPoolHost(
            device(layers), anchor,
            mtp_draft_device_pools=tuple(device(1) for _ in range(drafts)),
        )  # fmt: skip
    return filled(pool, fill)


def _page_rows(layers, row):
    from sglang.srt.mem_cache.device_pool_info import PageRowBufferInfo

    slab = torch.zeros(layers, 2, row, dtype=torch.uint8)
    return PageRowBufferInfo(
        slab=slab, rows=tuple(slab), row_bytes=row, page_size=PAGE, num_pages=2
    )


def nvfp4_pool(*, layout, layers=3, row=48, pages=8, fill=None):
    """MiniMax-M3's packed KV rows."""
    from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost

    with host_budget():
        pool = MiniMaxM3Nvfp4MainKVPoolHost(
            _page_rows(layers, row), 1.0, 0, PAGE, layout, pin_memory=False,
            device_capacity_tokens=pages * PAGE, start_layer=0, end_layer=layers,
        )  # fmt: skip
    return filled(pool, fill)


def nvfp4_index_pool(*, layout, layers=3, row=24, pages=8, fill=None):
    """MiniMax-M3's packed index keys, on the KV pool's pages."""
    from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4IndexKPoolHost

    with host_budget():
        anchor = nvfp4_pool(layout="layer_first", layers=layers, pages=pages)
        pool = MiniMaxM3Nvfp4IndexKPoolHost(
            _page_rows(layers, row), anchor, layout, pin_memory=False, start_layer=0,
            end_layer=layers,
        )  # fmt: skip
    return filled(pool, fill)


def logical_pool(*, layout, pages=8, fill=None):
    """DeepSeek-V4's anchor: slots, and no bytes."""
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    return LogicalHostPool(pages * PAGE, PAGE, layout)


def mxfp8_pool(*, layout, layers=3, heads=2, dim=32, pages=8, fill=None):
    """FP8 KV with block scales. By hand: its constructor wants kernels of a GPU.

    The payload is built by its base class, the scales by its own code.
    """
    from sglang.srt.mem_cache.device_pool_info import KVScaleBuffers, KVScaleLayout
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

    size = 128
    rows = tuple(torch.zeros(2, heads, 32, 4, dim // 32, dtype=torch.uint8) for _ in range(layers))
    scales = KVScaleBuffers(k=rows, v=rows, layout=KVScaleLayout.MXFP8_INTERLEAVED)
    info = mha_info(
        layers=layers, heads=heads, dim=dim, dtype=torch.float8_e4m3fn, page_size=size,
        scales=scales,
    )  # fmt: skip
    given = {
        "pin_memory": False, "device_capacity_tokens": size, "start_layer": 0, "end_layer": layers,
        "host_token_capacity": pages * size,
    }  # fmt: skip
    kind = mha.get_mha_host_pool_cls(info)
    assert kind is MHATokenToKVPoolMXFP8Host
    with host_budget():
        if layout != "page_first":
            return kind(info, 1.0, 0, size, layout, **given)
        pool = object.__new__(kind)
        pool.k_sf_page_bytes = pool.v_sf_page_bytes = rows[0][0].numel()
        mha.MHATokenToKVPoolHost.__init__(pool, info, 1.0, 0, size, layout, **given)
        pool._init_scale_buffers(rows, rows)
    return filled(pool, fill)


def hisparse_pool(*, layout, layers=3, pages=8, fill=None):
    """HiSparse's MHA pool. By hand: its constructor always pins, which needs a GPU."""
    from sglang.srt.mem_cache.pool_host import mha

    if layout != "layer_first":
        raise ValueError("its constructor takes no layout: it is layer_first")
    pool = object.__new__(mha.HiSparseMHATokenToKVPoolHost)
    with host_budget():
        mha.MHATokenToKVPoolHost.__init__(
            pool, mha_info(layers=layers), 1.0, 0, PAGE, layout, pin_memory=False,
            device_capacity_tokens=PAGE, start_layer=0, end_layer=layers,
            host_token_capacity=pages * PAGE,
        )  # fmt: skip
    return filled(pool, fill)


def dummy_mla_pool(*, layout="page_first"):
    """The MLA pool of a rank that keeps no bytes, as another of its host does."""
    from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost

    allocation = MLAHostAllocation(
        dtype=torch.bfloat16, kv_lora_rank=12, qk_rope_head_dim=4, kv_cache_dim=16,
        size_per_token=96,
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        allocation, 1.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE,
        start_layer=0, end_layer=3, target_layer_num=3, host_token_capacity=8 * PAGE,
    )  # fmt: skip


def envelope_pool(*, layout="page_first"):
    """A page-envelope pool: whole pages of a unified device pool."""
    from sglang.srt.mem_cache.pool_host.unified import UnifiedPageEnvelopeHostPool

    pages = torch.zeros(4, 64, dtype=torch.uint8)
    device = SimpleNamespace(
        get_page_envelope_buffer=lambda: pages,
        get_contiguous_buf_infos=lambda: ([pages.data_ptr()], [pages.nbytes], [64]),
        page_size=PAGE, host_capacity_tokens=None, size=4 * PAGE, start_layer=0, end_layer=1,
        grow_direction="up",
    )  # fmt: skip
    with host_budget():
        return UnifiedPageEnvelopeHostPool(device, 2.0, 0, PAGE, layout, pin_memory=False)


def interleaved_pool(*, layout="page_first"):
    """A pool of every other page, as KV sharding wraps it around a whole one."""
    from sglang.srt.mem_cache.page_interleave import PageInterleavePlacement, PageShardSpec
    from sglang.srt.mem_cache.pool_host.page_interleave import PageInterleaveHostPool

    names = {"shard_rank": 0, "shard_size": 2, "page_size": PAGE}
    fields = {name: names.get(name, 0) for name in PageShardSpec.__struct_fields__}
    return PageInterleaveHostPool(
        mha_pool(layout=layout), PageInterleavePlacement(PageShardSpec(**fields))
    )
