"""Which pages a backend shares, on real host pools: those of its identity, and no others."""

import pytest
import torch

import host_pools
from backends import keys
from cachestore_connector.errors import ConfigError

CHANGES = {
    "model": {"extra": {"model_identity": "tests/other"}},
    "tp_rank": {"tp_rank": 1, "tp_size": 2},
    "tp_size": {"tp_size": 2},
    "pp_rank": {"pp_rank": 1, "pp_size": 2},
    "pp_size": {"pp_size": 2},
    "attn_cp_rank": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "namespace": {"extra": {"namespace": "tenant"}},
}
POOL_CHANGES = {
    "dtype": {"dtype": torch.float16},
    "layout": {"layout": "page_first"},
    "page_size": {"page_size": 32},
    "layers": {"layers": 2},
    "heads": {"heads": 1},
}


@pytest.mark.parametrize("change", [*CHANGES, *POOL_CHANGES])
def test_another_identity_is_a_miss(attach, change):
    """Pinned (F22, F23): same keys, other bytes: nothing is found, and nothing is overwritten."""
    pool = host_pools.mha_pool(fill=4)
    first = attach(pool)
    names = keys(2)
    first.batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    other_pool = host_pools.mha_pool(fill=5, **POOL_CHANGES.get(change, {}))
    other = attach(other_pool, **CHANGES.get(change, {}))
    assert other.batch_exists(names) == 0
    assert other.batch_get_v1(names, host_pools.indices(other_pool, [2, 3])) == [False] * 2
    assert other.batch_set_v1(names, host_pools.indices(other_pool, [0, 1])) == [True] * 2
    assert first.batch_get_v1(names, host_pools.indices(pool, [6, 7])) == [True] * 2
    assert torch.equal(host_pools.page_bytes(pool, 0), host_pools.page_bytes(pool, 6))


def test_mla_ranks_share_and_stages_do_not(attach):
    """Pinned (contract A9, F23, F25): another TP rank hits; another pipeline stage doesn't."""
    pool = host_pools.mla_pool(fill=6)
    names = keys(2)
    writer = attach(pool, is_mla=True, tp_rank=0, tp_size=4, pp_rank=0, pp_size=2)
    writer.batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    peer = attach(host_pools.mla_pool(), is_mla=True, tp_rank=3, tp_size=4, pp_rank=0, pp_size=2)
    stage = attach(host_pools.mla_pool(), is_mla=True, tp_rank=0, tp_size=4, pp_rank=1, pp_size=2)
    other_size = attach(host_pools.mla_pool(), is_mla=True, tp_size=8, pp_rank=0, pp_size=2)
    assert peer.batch_exists(names) == 2
    assert stage.batch_exists(names) == 0
    assert other_size.batch_exists(names) == 0


def test_another_split_into_stages_is_a_miss(attach, monkeypatch):
    """Pinned (F23): the middle one of three stages has as many layers as before, but others."""
    stage = {"pp_rank": 1, "pp_size": 3}
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "4,4,4")
    pool = host_pools.mha_pool(fill=16)
    first = attach(pool, **stage)
    names = keys(2)
    first.batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "5,4,3")
    other = attach(host_pools.mha_pool(fill=17), **stage)
    assert other.batch_exists(names) == 0
    assert other.identity.family != first.identity.family  # and that of every other pool
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "4,4,4")
    assert attach(host_pools.mha_pool(), **stage).batch_exists(names) == 2


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_updated_weights_end_the_use_of_what_is_stored(attach, caplog, monkeypatch, kind):
    """Pinned (F22): after an update in place nothing of the old weights is found, or mixed in.

    Nor what is in a buffer: an MLA model's.

    A new attach needs a weight version, and is another identity with one.
    """
    from cachestore_connector import backend as module
    from cachestore_connector import weights

    monkeypatch.setattr(weights, "updates", 0)
    make, is_mla = getattr(host_pools, f"{kind}_pool"), kind == "mla"
    pool = make(fill=15)
    backend = attach(pool, is_mla=is_mla)
    names = keys(2)
    backend.batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    weights.count_update()
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, host_pools.indices(pool, [2, 3])) == [False] * 2
    assert backend.batch_set_v1(keys(1, 5), host_pools.indices(pool, [0])) == [False]
    assert "weights were updated" in caplog.text
    with pytest.raises(ConfigError, match="weight_version = 'default'"):
        attach(make(), is_mla=is_mla)
    monkeypatch.setattr(module, "_weights_now", lambda: (1, "step-2"))
    updated = attach(make(), is_mla=is_mla)
    assert updated.batch_exists(names) == 0
    assert updated.identity.parts()["variant"] == {"weight_version": "step-2"}


def _told(path, moe=(), spec=(), **others):
    """What a server was told: the model's arguments, and those of other namespaces."""
    fields = {"model_path": str(path), "kv_cache_dtype": "auto", "load_format": "auto"}
    return {"model": fields | others, "moe": dict(moe), "spec": dict(spec)}


def test_a_relative_model_path_is_one_place(attach, monkeypatch, tmp_path):
    """Pinned (F22): `./ckpt` in two directories are two models; a slash at the end is nothing."""
    from cachestore_connector import backend as module

    names, pool = keys(2), host_pools.mha_pool(fill=16)
    for place in ("a", "b"):
        (tmp_path / place / "ckpt").mkdir(parents=True)
    given = {"extra": {"model_identity": None}}
    monkeypatch.setattr(module, "_arguments", lambda: _told("./ckpt"))
    monkeypatch.chdir(tmp_path / "a")
    attach(pool, **given).batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    monkeypatch.chdir(tmp_path / "b")
    assert attach(host_pools.mha_pool(), **given).batch_exists(names) == 0
    monkeypatch.setattr(module, "_arguments", lambda: _told(f"{tmp_path}/a/ckpt/"))
    assert attach(host_pools.mha_pool(), **given).batch_exists(names) == 2


def test_other_weights_under_one_path_are_a_miss(attach, monkeypatch, tmp_path):
    """Pinned (F22): rewritten weight files, and another load format, are other identities."""
    from cachestore_connector import backend as module

    names, pool = keys(2), host_pools.mha_pool(fill=17)
    given = {"extra": {"model_identity": None}}
    checkpoint = tmp_path / "ckpt"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(bytes(range(256)) * 400)
    monkeypatch.setattr(module, "_arguments", lambda: _told(checkpoint))
    attach(pool, **given).batch_set_v1(names, host_pools.indices(pool, [0, 1]))
    assert attach(host_pools.mha_pool(), **given).batch_exists(names) == 2
    (checkpoint / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 400)
    assert attach(host_pools.mha_pool(), **given).batch_exists(names) == 0
    monkeypatch.setattr(module, "_arguments", lambda: _told(checkpoint, load_format="dummy"))
    assert attach(host_pools.mha_pool(), **given).batch_exists(names) == 0
