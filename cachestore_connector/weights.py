"""Which weights these are: a sample of their files, and how often they were replaced in place.

SGLang can update weights on a live server. It empties its own caches then, and tells a storage
backend nothing; pages stored before would be taken for the new weights'. The plugin counts here,
and the backend looks.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, BinaryIO

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES = 8  # of each file, evenly spaced
_SAMPLE_BYTES = 4096

# What says how the weights are used: positions (a `rope_scaling` changes every K), quantization.
# As transformers, and SGLang's quantization methods (`get_config_filenames`), call them.
_CONFIGS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "quant_model_description.json",
)

# Scales of a quantized KV cache, by the ends of their names in a checkpoint.
# Source: sglang.srt.model_loader.weight_utils, maybe_remap_kv_scale_name.
_KV_SCALES = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
_HEADER_BYTES = 100_000_000  # the format's own limit
_SCALE_BYTES = 1 << 16

updates = 0


def sample(model_path: str | None) -> str | None:
    """A digest of what tells a checkpoint from others; None if there are no weights at that path.

    Of some bytes of every weight file, which training changes nearly all of; of all scales of a
    quantized KV cache, which can be calibrated anew alone; and of the configuration. The same
    files copied elsewhere give the same digest. Raises OSError for a file that can't be read.
    """
    if not model_path or not os.path.exists(model_path):
        return None
    if not os.path.isdir(model_path):  # a GGUF file
        model_path, name = os.path.split(model_path)
        names = [name]
    else:
        names = sorted(os.listdir(model_path))
    if not any(name.endswith(_WEIGHTS) for name in names):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        path = os.path.join(model_path, name)
        if name.endswith(_WEIGHTS):
            with open(path, "rb") as file:
                _add_sample(digest, name, file)
                if name.endswith(".safetensors"):
                    _add_scales(digest, file)
        elif name in _CONFIGS:
            _add_name(digest, name, os.path.getsize(path))
            digest.update(file_digest(path).encode())
    return digest.hexdigest()


def _add_name(digest: Any, name: str, size: int) -> None:
    digest.update(f"{name}:{size}:".encode("utf-8", "surrogatepass"))


def _add_sample(digest: Any, name: str, file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    _add_name(digest, name, size)
    for i in range(_SAMPLES):
        file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0)
        digest.update(file.read(_SAMPLE_BYTES))


def _add_scales(digest: Any, file: BinaryIO) -> None:
    """The scales in a safetensors file. Nothing of one that isn't in that format."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > _HEADER_BYTES:
        return
    header = file.read(length)
    if not any(f'{end}"'.encode() in header for end in _KV_SCALES):
        return
    try:
        tensors = dict(json.loads(header))
        places = []
        for name in sorted(name for name in tensors if name.endswith(_KV_SCALES)):
            first, end = tensors[name]["data_offsets"]
            places.append((name, first, end))
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    for name, first, end in places:
        if type(first) is int and type(end) is int and 0 <= first <= end <= first + _SCALE_BYTES:
            _add_name(digest, name, end - first)
            file.seek(8 + length + first)
            digest.update(file.read(end - first))


def file_digest(path: str) -> str:
    """A digest of all of a file. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.blake2b(digest_size=16)
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def hub_commit(name: str, revision: str | None, cache: str | None) -> str | None:
    """The commit that a hub's model has in the cache of this host; None if it isn't there.

    ``cache``: the directory of that cache, or None for the usual one.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        path = try_to_load_from_cache(name, "config.json", cache_dir=cache, revision=revision)
    except ValueError:  # not the name of a repository
        return None
    # <cache>/models--<name>/snapshots/<commit>/config.json
    return os.path.basename(os.path.dirname(path)) if isinstance(path, str) else None


def count_update() -> None:
    """Weights have been replaced. Called on the scheduler thread alone."""
    global updates
    updates += 1
