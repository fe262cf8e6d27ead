"""What SGLang is told about a model, and what of it is in the identity (F22)."""

import inspect
import json
import struct
import types

import msgspec
import pytest
import torch

import host_pools
import side_pools
from cachestore_connector import model_facts, weights
from cachestore_connector.errors import ConfigError

PLAIN = {"weight_version": None, "weights_named": True, "plain_kv": True, "draft_layers": False}


def variant(changes=(), **told):
    """The variant of arguments, of the model's namespace unless another is named."""
    spaces = {space: told.pop(space, {}) for space in ("moe", "spec")}
    return model_facts.variant({"model": told, **spaces}, **(PLAIN | dict(changes)))


def tensors_file(path, tensors, pad=0):
    """A safetensors file, written by the format's page; ``pad``: other bytes between."""
    header, data = {}, b""
    for name, content in tensors.items():
        data += bytes(pad)
        header[name] = {
            "dtype": "U8", "shape": [len(content)],
            "data_offsets": [len(data), len(data) + len(content)],
        }  # fmt: skip
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + bytes(pad))


def test_every_argument_exists_in_sglang():
    """Pinned: a name that SGLang 0.5.23 doesn't have would quietly never be looked at."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    spaces = namespace_of(ServerArgs)
    for space, names in model_facts.ARGUMENTS.items():
        real = {"moe": "exec.moe"}.get(space, space)
        assert {spaces[name] for name in names} == {real}


def test_the_backend_takes_them_from_the_runtime_context(monkeypatch):
    """Pinned: each argument is read from its namespace; outside a server there are none."""
    from cachestore_connector import backend

    assert backend._arguments() == {}
    bags = {
        space: types.SimpleNamespace(**{name: f"{space} {name}" for name in names})
        for space, names in model_facts.ARGUMENTS.items()
    }
    context = types.SimpleNamespace(
        get_model=lambda: bags["model"],
        get_exec=lambda: types.SimpleNamespace(moe=bags["moe"]),
        get_spec=lambda: bags["spec"],
    )
    monkeypatch.setattr(backend, "runtime_context", context)
    found = backend._arguments()
    assert found == {
        space: {name: f"{space} {name}" for name in names}
        for space, names in model_facts.ARGUMENTS.items()
    }


KV_TYPES = [
    ("torch.bfloat16", "auto", None, "bfloat16"),
    ("torch.bfloat16", "bf16", "float8_e4m3fn", "bfloat16"),
    ("torch.float16", "auto", "float8_e4m3fnuz", "float16"),
    ("torch.uint8", "auto", "float8_e4m3fn", "auto as uint8"),
    ("torch.uint8", "fp8_e4m3", "float8_e4m3fn", "fp8_e4m3 as uint8"),
    ("torch.uint8", "fp8_e4m3", "float8_e4m3fnuz", "fp8_e4m3 (float8_e4m3fnuz) as uint8"),
    ("torch.uint8", "fp8_e5m2", "float8_e4m3fn", "fp8_e5m2 as uint8"),
    ("torch.uint8", "nvfp4", "float8_e4m3fn", "nvfp4 as uint8"),
    ("torch.uint8", "fp4_mx_block16", "float8_e4m3fn", "fp4_mx_block16 as uint8"),
    ("torch.uint8", "mxfp8", "float8_e4m3fn", "mxfp8 as uint8"),
    ("torch.float8_e4m3fn", "mxfp8", "float8_e4m3fn", "mxfp8 as float8_e4m3fn"),
    ("torch.float8_e4m3fn", "fp8_e4m3", "float8_e4m3fn", "fp8_e4m3 as float8_e4m3fn"),
    ("torch.float8_e4m3fn", None, None, "float8_e4m3fn"),
]


@pytest.mark.parametrize(("stored", "setting", "fp8", "wanted"), KV_TYPES)
def test_kv_types(stored, setting, fp8, wanted):
    """Pinned: what is stored as bytes is named by the setting and, where it matters, the platform.

    `auto` of two checkpoints is two types, which the host pool tells apart, or their configuration.
    """
    assert model_facts.kv_dtype(stored, {"kv_cache_dtype": setting}, fp8) == wanted
    assert model_facts.is_plain(wanted) == ("float8" not in wanted and "uint8" not in wanted)


def test_kv_types_are_told_apart():
    """Pinned: rows with other bytes have other names; bf16 has one, however it was asked for."""
    names = [model_facts.kv_dtype(s, {"kv_cache_dtype": k}, f) for s, k, f, _ in KV_TYPES]
    assert len(set(names)) == len(KV_TYPES) - 1


@pytest.mark.parametrize(
    "told",
    [
        {"load_format": "dummy"},
        {"quantization": "fp8"},
        {"quantization": "awq"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"model_impl": "transformers"},
        {"modelopt_quant": "fp8"},
        {"rl_quant_profile": "x"},
        {"custom_weight_loader": ["a.b"]},
        {"qsa_indexer_dtype": "fp8_e4m3"},
        {"moe": {"enable_w4a4_mxfp4_megamoe": True}},
        {"moe": {"flashinfer_mxfp4_moe_precision": "fp8"}},
        {"moe": {"kt_weight_path": "/experts"}},
        {"moe": {"kt_weight_path": "/experts", "kt_method": "AMXINT8"}},
        {"moe": {"kt_weight_path": "/experts", "kt_num_gpu_experts": 4}},
        {"modelopt_checkpoint_restore_path": "/restored"},
    ],
    ids=str,
)
def test_arguments_that_change_the_weights_are_in(told):
    """Pinned: each of them is in the variant, by its name, and none is in another's place."""
    found = variant(**told)
    names = {name for space in ("moe", "spec") for name in told.get(space, ())}
    assert set(found) == names or set(found) == set(told)


def test_defaults_and_the_rest_are_not():
    """Pinned: what says nothing, and what doesn't change the KV, shares pages."""
    told = {
        "load_format": "auto", "quantization": None, "json_model_override_args": "{}",
        "custom_weight_loader": [], "modelopt_quant": None, "qsa_indexer_dtype": "auto",
        "dtype": "bfloat16", "kv_cache_dtype": "auto", "revision": "main", "port": 30000,
        "moe": {
            "enable_w4a4_mxfp4_megamoe": False, "flashinfer_mxfp4_moe_precision": "default",
            "kt_weight_path": None, "kt_method": "AMXINT4",
        },
        "spec": {"speculative_draft_model_path": "/draft", "speculative_algorithm": "EAGLE"},
    }  # fmt: skip
    assert variant(**told) == {}


def test_the_type_that_quantized_kv_was_computed_in_is_in():
    """Pinned: FP8 pages of a float16 and a bfloat16 model have one type and other bytes."""
    assert variant({"plain_kv": False}, dtype="float16") == {"dtype": "float16"}


@pytest.mark.parametrize("argument", ["quantization_param_path", "decrypted_config_file"])
def test_a_file_counts_by_what_is_in_it(tmp_path, argument):
    """Pinned: KV scales rewritten under one path are others; moved ones are the same."""
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text('{"0": 1.5}')
    second.write_text('{"0": 1.5}')
    before = variant(**{argument: str(first)})
    assert before == variant(**{argument: str(second)})
    first.write_text('{"0": 1.6}')
    assert variant(**{argument: str(first)}) != before
    with pytest.raises(OSError, match="gone"):
        variant(**{argument: str(tmp_path / "gone")})


def checkpoint(tmp_path, name="ckpt"):
    directory = tmp_path / name
    directory.mkdir()
    scales = {"model.layers.0.self_attn.k_proj.k_scale": bytes(4), "w": bytes(range(200)) * 50}
    tensors_file(directory / "model.safetensors", scales | {"end": bytes(9000)}, pad=50_000)
    (directory / "config.json").write_text('{"rope_theta": 10000}')
    (directory / "README.md").write_text("one")
    return directory


def test_the_same_files_elsewhere_are_the_same_weights(tmp_path):
    """Pinned: copies share; what isn't weights or configuration doesn't matter."""
    first, second = checkpoint(tmp_path), checkpoint(tmp_path, "copy")
    (second / "README.md").write_text("another")
    (second / "tokenizer.json").write_text("{}")
    assert weights.sample(str(first)) == weights.sample(str(second)) is not None


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "quantize_config.json", "params.json"]
)
def test_an_edited_configuration_is_another_model(tmp_path, name):
    """Pinned: a rope_scaling added by hand changes every K, and no byte of the weights."""
    directory = checkpoint(tmp_path)
    before = weights.sample(str(directory))
    (directory / name).write_text('{"rope_theta": 10000, "rope_scaling": {"factor": 4}}')
    assert weights.sample(str(directory)) != before


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.v_proj.v_scale",
     "model.layers.0.self_attn.kv_scale", "model.layers.0.self_attn.k_proj.output_scale"],
)  # fmt: skip
def test_scales_calibrated_anew_are_other_weights(tmp_path, name):
    """Pinned: the four bytes of one KV scale in a checkpoint, wherever they lie in it."""
    for size in (1, 60_000):
        path = tmp_path / "model.safetensors"
        others = {f"w{i}": bytes([i]) * size for i in range(20)}
        digests = set()
        for scale in (b"\0\0\x80\x3f", b"\0\0\x81\x3f"):
            tensors_file(path, others | {name: scale} | {"z": bytes(size)}, pad=size)
            digests.add(weights.sample(str(tmp_path)))
        assert len(digests) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\1", struct.pack("<Q", 2**63) + b'".k_scale"',
        struct.pack("<Q", 12) + b'{".k_scale":',
        struct.pack("<Q", 13) + b'{".k_scale":1', struct.pack("<Q", 14) + b'{".k_scale":1}',
        struct.pack("<Q", 14) + b'[".k_scale",1]', struct.pack("<Q", 200000) + b"[" * 199000,
        struct.pack("<Q", 45) + b'{"a.k_scale":{"data_offsets":[-5,99999999]}} ',
        struct.pack("<Q", 45) + b'{"a.k_scale":{"data_offsets":["a",[9999]]}}  ',
        struct.pack("<Q", 45) + b'{"a.k_scale":{"data_offsets":[0]}}           ',
    ],
    ids=range(11),
)  # fmt: skip
def test_a_file_that_is_not_safetensors_has_a_sample_too(tmp_path, content):
    """Pinned: whatever lies there, attach doesn't fail over it."""
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights.sample(str(tmp_path)) is not None


def test_a_single_file_is_a_checkpoint(tmp_path):
    """Pinned: a model path can be a GGUF file; its bytes count."""
    path = tmp_path / "model.gguf"
    digests = set()
    for content in (b"one", b"two"):
        path.write_bytes(content)
        digests.add(weights.sample(str(path)))
    assert len(digests) == 2 and None not in digests
    assert weights.sample(str(tmp_path / "gone")) is None


def test_a_hubs_model_is_known_by_its_commit(tmp_path):
    """Pinned: `main` today and `main` tomorrow are two; without a cache the revision is all."""
    commits = ["a" * 40, "b" * 40]
    model = {"model_path": "org/model", "revision": None, "download_dir": str(tmp_path)}
    assert model_facts.revision(model) is None
    assert model_facts.revision(model | {"revision": "v2"}) == "v2"
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    for commit in commits:
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs" / "main").write_text(commit)
        assert model_facts.revision(model) == commit
        assert model_facts.revision(model | {"revision": "main"}) == commit
    assert model_facts.revision(model | {"revision": commits[0]}) == commits[0]
    assert model_facts.revision(model | {"model_path": str(tmp_path)}) is None
    assert model_facts.revision(model | {"model_path": "not a/name/of one"}) is None


def test_named_weights_are_not_looked_at(tmp_path):
    """Pinned: model_identity says which weights these are, wherever they lie."""
    path = str(checkpoint(tmp_path))
    assert variant(model_path=path) == {}
    assert set(variant({"weights_named": False}, model_path=path)) == {"weights"}


def test_a_draft_model_in_the_pages_is_in_the_identity(tmp_path):
    """Pinned: layers of a draft model that lie in the target's pages are that model's."""
    path = str(checkpoint(tmp_path))
    spec = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": path + "/"}
    found = variant({"draft_layers": True}, spec=spec)
    assert found == {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": path,
        "draft_weights": weights.sample(path),
    }
    assert variant({"draft_layers": True}, spec=spec | {"speculative_draft_model_path": "b"}) != (
        found
    )


# On real host pools.


def test_draft_layers_are_those_after_the_targets():
    """Pinned on real pools: without a draft model there are none; where none says, there may be."""
    from cachestore_connector.pools import has_draft_layers

    for make in (host_pools.mha_pool, host_pools.mla_pool):
        assert not has_draft_layers(make()) and has_draft_layers(make(drafts=1))
        assert has_draft_layers(make(), "draft") and not has_draft_layers(make(), "swa")
    for name, make in (("indexer", side_pools.dsa_pool), ("mamba", side_pools.mamba_pool)):
        given = {"layout": "page_first"}
        assert not has_draft_layers(make(**given), name)
        assert has_draft_layers(make(drafts=1, **given), name)
    assert has_draft_layers(side_pools.paged_pool(layout="page_first"), "swa")


@pytest.mark.parametrize("layout", ["HND", "VECTORIZED_5D", "PAGED_NHD"])
def test_another_order_in_the_device_pool_is_a_miss(attach, layout):
    """Pinned (F22): the host pool's layout and sizes are the same, the bytes in them aren't."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout

    from backends import keys

    pool, names = host_pools.mha_pool(fill=18), keys(2)
    usual = attach(pool)
    usual.batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    assert "device_layout" not in usual.identity.parts()
    other_pool = host_pools.mha_pool()
    (info,) = other_pool._buffer_infos
    buffers = msgspec.structs.replace(info.buffers, layout=KVBufferLayout[layout])
    other_pool._buffer_infos = (msgspec.structs.replace(info, buffers=buffers),)
    other = attach(other_pool)
    assert other.batch_exists(names) == 0
    assert other.identity.parts()["device_layout"] == KVBufferLayout[layout].value


@pytest.mark.parametrize("setting", ["fp8_e4m3", "fp8_e5m2", "auto", "nvfp4", "mxfp8"])
def test_kinds_of_fp8_in_bytes_are_told_apart(attach, monkeypatch, setting):
    """Pinned (F22): pools of uint8 look alike; only one of five settings finds its pages."""
    from backends import keys
    from cachestore_connector import backend as module

    names, given = keys(2), {"extra": {"model_identity": "w"}}

    def told(value):
        return lambda: {"model": {"model_path": "/m", "kv_cache_dtype": value}}

    pool = host_pools.mha_pool(dtype=torch.uint8, fill=19)
    monkeypatch.setattr(module, "_arguments", told(setting))
    attach(pool, **given).batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    for other in ("fp8_e4m3", "fp8_e5m2", "auto", "nvfp4", "mxfp8"):
        monkeypatch.setattr(module, "_arguments", told(other))
        found = attach(host_pools.mha_pool(dtype=torch.uint8), **given).batch_exists(names)
        assert found == (2 if other == setting else 0)


def test_this_platforms_fp8_is_sglangs():
    """Pinned: where the FP8 of a platform stands in SGLang."""
    from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype

    from cachestore_connector import backend

    assert backend._fp8_kind() == str(fp8_dtype).removeprefix("torch.")
    assert "fp8_dtype" in inspect.getsource(__import__(
        "sglang.srt.mem_cache.kv_cache_dtype", fromlist=["x"]
    ).configure_kv_cache_dtype)  # fmt: skip


@pytest.mark.parametrize(
    "same",
    [
        {"dp_rank": 1},
        {"metrics": True},
        {"extra": {"timeout_ms": 1000, "verify": "sample", "posix_queue_depth": 256}},
        {"extra": {"posix_capacity_gb": 50, "posix_low_watermark_percent": 90}},
        {"extra": {"io_direct": True}},
        {"extra": {"store_pipeline": "Cache|Posix"}},
        {"tp_lcm_size": 4},
    ],
    ids=str,
)
def test_what_changes_no_byte_shares(attach, same):
    """Pinned: replicas, and other settings of the store, find each other's pages."""
    from backends import keys

    pool, names = host_pools.mha_pool(fill=20), keys(2)
    attach(pool).batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    other_pool = host_pools.mha_pool()
    other = attach(other_pool, **same)
    assert other.batch_get_v1(names, host_pools.indices(other_pool, [2, 3])) == [True] * 2
    assert torch.equal(host_pools.page_bytes(pool, 0), host_pools.page_bytes(other_pool, 2))


def test_a_namespace_is_seen_where_its_pages_lie(attach, tmp_path):
    """Pinned: in the manifest and in the directory's name; an empty one is refused."""
    from cachestore_connector import manifest

    backend = attach(host_pools.mha_pool(), extra={"namespace": "team a"})
    (path,) = (tmp_path / "store").glob("model-team_a-*/identity.json")
    assert manifest.read(path.read_bytes()).identity["namespace"] == "team a"
    assert backend.identity.directory_name == path.parent.name
    with pytest.raises(ConfigError, match="namespace"):
        attach(host_pools.mha_pool(), extra={"namespace": ""})
