"""What SGLang hands a backend: its storage config, and page keys; what then lies on disk."""

import os
import time
from pathlib import Path


def storage_config(root, *, is_mla=False, metrics=False, **changes):
    """SGLang's storage config; a dict under ``extra`` is laid over our settings."""
    extra = {
        "storage_backends": [str(root)],
        "model_identity": "tests/model",
        # Of the Cache tier; beside the blocks, so that a test leaves nothing in /dev/shm.
        "cache_buffer_directory": str(Path(root).parent),
        "cache_buffer_capacity_gb": 1 / 256,
    }
    extra |= changes.pop("extra", {})
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1,
        "attn_cp_rank": 0, "attn_cp_size": 1, "model_name": "served",
    }  # fmt: skip
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        is_mla_model=is_mla,
        enable_storage_metrics=metrics,
        is_page_first_layout=False,
        extra_config=extra,
        **(fields | changes),
    )


def keys(count, start=0):
    """Page keys as SGLang makes them: 64 hex digits."""
    return [f"{i:064x}" for i in range(start, start + count)]


def counters_become(backends, timeout=10, **wanted):
    """Wait until the backends' counters add up to what is wanted, and say what they are.

    A shard is counted by its kind just after its waiter was told.
    """
    deadline = time.monotonic() + timeout
    while True:
        counted = [backend.counters() for backend in backends]
        sums = {name: sum(each[name] for each in counted) for name in wanted}
        if sums == wanted or time.monotonic() > deadline:
            assert sums == wanted
            return
        time.sleep(0.005)


def blocks(root):
    """The block files below a directory, but for cleared ones, which vanish behind our back."""
    found = []
    for directory, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in ("trash", "tmp")]
        if Path(directory).parent.name == "blocks":
            found += [Path(directory, name) for name in files]
    return sorted(found)


def flip(path, at=3):
    """Change one bit of a file, in place: by default of the first tensor's bytes."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
