"""What SGLang was told about a model that changes its KV for the same tokens, as identity parts.

Everything here gets values that the backend took from SGLang, by the names of its server arguments
(0.5.23), and reads files of the model; it imports nothing of SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import weights

# Arguments that go into the identity as they are, unless they say nothing. By namespace of
# sglang.srt.runtime_context.
VARIANT_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "model": (
        "load_format",  # `dummy` makes other weights of the same path
        "model_loader_extra_config",
        "custom_weight_loader",
        "modelopt_quant",
        "rl_quant_profile",
        "quantization",
        "json_model_override_args",
        "model_impl",
        "qsa_indexer_dtype",
    ),
    "moe": ("enable_w4a4_mxfp4_megamoe", "flashinfer_mxfp4_moe_precision"),
}

# Arguments that name a file: what is in it counts, not where it lies.
FILE_ARGUMENTS = (
    "quantization_param_path",  # the scales of an FP8 KV cache
    "decrypted_config_file",
)

# Arguments that name a directory with weights of its own.
WEIGHTS_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "model": ("modelopt_checkpoint_restore_path",),
    "moe": ("kt_weight_path",),  # quantized experts of ktransformers
}

# What counts beside `kt_weight_path`.
_KT_ARGUMENTS = ("kt_method", "kt_num_gpu_experts")

# Of a draft model whose layers lie in the target's pages.
_DRAFT_ARGUMENTS = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)

# Every argument that is looked at, by namespace: what the backend takes from SGLang.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "model": (
        "model_path",
        "revision",
        "download_dir",
        "dtype",
        "kv_cache_dtype",
        *FILE_ARGUMENTS,
        *VARIANT_ARGUMENTS["model"],
        *WEIGHTS_ARGUMENTS["model"],
    ),
    "moe": (*VARIANT_ARGUMENTS["moe"], *WEIGHTS_ARGUMENTS["moe"], *_KT_ARGUMENTS),
    "spec": _DRAFT_ARGUMENTS,
}

_SAYS_NOTHING = (None, "", "{}", "auto", "default", False, [], {})

# Types whose name says how the bytes are read. The others are stored as something else (FP8 and
# FP4 as uint8), or may come with scales (MXFP8).
_PLAIN_TYPES = ("bfloat16", "float16", "float32")


def place(path: str | None) -> str | None:
    """A path as every process would say it; the name of a hub's repository as it is."""
    return os.path.realpath(path) if path and os.path.exists(path) else path


def revision(model: Mapping[str, Any]) -> str | None:
    """The commit of a hub's model, if its cache on this host says so; else the revision asked for.

    A branch moves: what was `main` yesterday may be other weights today.
    """
    path, asked = model.get("model_path"), model.get("revision")
    if not path or os.path.exists(path):
        return asked
    return weights.hub_commit(path, asked, model.get("download_dir")) or asked


def kv_dtype(stored: str, model: Mapping[str, Any], fp8_kind: str | None) -> str:
    """The KV's type. ``stored``: the host pool's. ``fp8_kind``: this platform's FP8, if known.

    Where the type isn't a plain one, SGLang's setting says which it is: `auto` is then what the
    checkpoint says, and FP8 is not the same on every platform.
    Source: sglang.srt.mem_cache.kv_cache_dtype, configure_kv_cache_dtype.
    """
    stored = stored.removeprefix("torch.")
    setting = model.get("kv_cache_dtype")
    if stored in _PLAIN_TYPES or not setting:
        return stored
    kind = "" if fp8_kind in (None, "float8_e4m3fn") else f" ({fp8_kind})"
    return f"{setting}{kind} as {stored}"


def is_plain(dtype: str) -> bool:
    """Whether a `kv_dtype` is one that the KV is computed in too."""
    return dtype in _PLAIN_TYPES


def variant(
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    weight_version: str | None,
    weights_named: bool,
    plain_kv: bool,
    draft_layers: bool,
) -> dict[str, str]:
    """What else changes the bytes, as name -> value.

    ``arguments``: values of `ARGUMENTS`, by namespace. ``weight_version``: of an update in place.
    ``weights_named``: a model_identity says which the weights are, so no file of theirs is looked
    at. ``plain_kv``: whether the KV has the type that it was computed in. ``draft_layers``: whether
    pages hold layers of a draft model too. Raises OSError for a file that can't be read.
    """
    found: dict[str, str] = {}
    for space, names in VARIANT_ARGUMENTS.items():
        _take(found, arguments.get(space, {}), names)
    model, moe = arguments.get("model", {}), arguments.get("moe", {})
    if not plain_kv:
        # The type that it was computed in: the stored one doesn't tell.
        _take(found, model, ("dtype",))
    for name in FILE_ARGUMENTS:
        if model.get(name):
            found[name] = weights.file_digest(model[name])
    for space, names in WEIGHTS_ARGUMENTS.items():
        for name in names:
            path = arguments.get(space, {}).get(name)
            if path:
                found[name] = weights.sample(path) or str(place(path))
    if moe.get("kt_weight_path"):
        _take(found, moe, _KT_ARGUMENTS)
    if weight_version is not None:
        found["weight_version"] = weight_version
    if not weights_named:
        _sample(found, "weights", model.get("model_path"))
    if draft_layers:
        spec = arguments.get("spec", {})
        _take(found, spec, _DRAFT_ARGUMENTS)
        draft = spec.get("speculative_draft_model_path")
        if draft:
            found["speculative_draft_model_path"] = str(place(draft))
            _sample(found, "draft_weights", draft)
    return found


def _take(found: dict[str, str], values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = values.get(name)
        if value not in _SAYS_NOTHING:
            found[name] = str(value)


def _sample(found: dict[str, str], name: str, path: str | None) -> None:
    digest = weights.sample(path)
    if digest is not None:
        found[name] = digest
