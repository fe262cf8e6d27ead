"""UCM's documented keys, and what becomes of each (`cachestore_connector.ucm_settings`)."""

from __future__ import annotations

from typing import Any

#: Keys with the same name and meaning here; with the value, if any, that means as much as none.
SAME: dict[str, Any] = {
    "timeout_ms": None,
    "io_direct": None,
    "share_buffer_enable": None,
    "cache_buffer_capacity_gb": 0,
    "posix_capacity_gb": 0,
    "cache_use_host_buffer": None,
    "cache_h2h_worker_number": None,
    "cache_h2h_queue_depth": None,
}

#: None of these paths is built here.
DEVICE_PATHS = (
    "cache_io_aggregation",
    "cache_sdma_direct",
    "use_gdr",
    "gpu_kv_buffer_addrs",
)

#: UCM's own connector overwrites these too.
FILLED_IN = ("tensor_size", "tensor_size_list", "shard_size", "block_size", "device_id")

#: Keys that others of ours come from.
CONVERTED = (
    "posix_data_trans_concurrency",
    "posix_gc_trigger_threshold_ratio",
    "posix_gc_recycle_percent",
)

#: Older names.
ALIASES = {"use_direct": "io_direct"}

#: How keys of stores that aren't files begin.
OTHER_STORES = ("yuanrong_",)

#: SGLang's keys that name UCM's class to its dynamic backend.
DYNAMIC_KEYS = ("backend_name", "module_path", "class_name", "interface_v1")

_VLLM = "of UCM's vLLM connector; SGLang's HiCache decides that"
_GC = "eviction needs no setting for that: the blocks used longest ago go, of all directories"
_HEALTH = "a failing directory is taken out of use, probed and brought back by itself"
OTHER_STORE = "of a store that isn't files in a directory"

#: Why there is no counterpart.
NO_COUNTERPART: dict[str, str] = {
    "ucm_connector_module_path": "of UCM's factory",
    "stream_number": "posix_load_worker_number and posix_dump_worker_number are the threads here",
    "posix_io_engine": "files are read and written by threads, each call synchronous",
    "posix_open_concurrency": "of UCM's aio engine",
    "posix_commit_concurrency": "of UCM's aio engine",
    "posix_lookup_concurrency": "a lookup is a stat, made on SGLang's thread; on network file "
    "systems by the threads that load",
    "cache_load_backend_only": "a switch for tests",
    "posix_gc_enable": "blocks are evicted where posix_capacity_gb is set",
    "posix_gc_max_recycle_count_per_shard": _GC,
    "posix_gc_shard_sample_ratio": _GC,
    "posix_gc_check_interval_sec": _GC,
    "posix_gc_concurrency": _GC,
    "posix_gc_task_timeout_ms": _GC,
    "posix_gc_precise_mode": _GC,
    "store_health": _HEALTH,
    "shard_data_dir": "files are always spread over 4096 directories",
    "data_dir_shard_bytes": "files are always spread over 4096 directories",
    "cache_load_exclusive_buffer_number": "dumps leave an eighth of the buffer to loads",
    "buffer_number": "transfers need no buffers of a fixed number",
    "local_hostname": OTHER_STORE,
    "master_server_address": OTHER_STORE,
    "metadata_server": OTHER_STORE,
    "protocol": OTHER_STORE,
    "global_segment_size_gb": OTHER_STORE,
    "replica_num": OTHER_STORE,
    "share_buffer_capacity_gb": OTHER_STORE,
    "use_layerwise": _VLLM,
    "enable_event_sync": _VLLM,
    "wa_dump_block_wise": _VLLM,
    "load_only_first_rank": "of an MLA model one rank stores and every rank loads, by itself",
    "persist_token_threshold": "SGLang's prefetch_threshold (tokens) is the nearest: shorter hits "
    "aren't fetched",
    "load_tokens_threshold": "SGLang's prefetch_threshold (tokens) is the nearest",
    "ucm_sparse_config": "sparse attention isn't the store's",
    "enable_record_traces": "requests aren't recorded",
    "enable_metrics": "metrics are on where SGLang's are (--enable-metrics)",
    "metrics_config_path": "metrics are on where SGLang's are (--enable-metrics)",
    "use_lite": "there is no store without data",
    "hit_ratio": "a switch for tests",
}
