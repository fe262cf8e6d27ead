"""Identity on the real server: what changes the bytes of a page for the same tokens is a miss."""

import shutil
from pathlib import Path

import pytest

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "cachestore.yaml"
PROMPT = 690
STORED = 640
PAGES = 10


def differences(one, other):
    """The fields of the identity in which two manifests differ."""
    names = (one.keys() | other.keys()) - {"store", "family"}  # what follows from the fields
    return {name for name in names if one.get(name) != other.get(name)}


def keep(llama_server, attached, storage, ids, computed, **settings):
    """Have the shared server store ``ids``; returns the answer and the name of its identity."""
    known = set(storage.manifests())
    with attached(llama_server, "cachestore", storage.config(**settings)):
        cold = computed(llama_server, ids)
        (name,) = set(storage.manifests()) - known
        storage.wait(PAGES, identity=name)
    return cold, name


def test_another_model_under_the_same_name(
    llama_server, attached, storage_at, checkpoint, serve, tmp_path, prompt, computed, restored
):
    """Pinned: served under one name, two models never see each other's pages (F22).

    The other one is started with the shipped configuration, and stores in XDG_CACHE_HOME.
    """
    storage, ids = storage_at(tmp_path / "cachestore"), prompt(PROMPT, seed=60)
    first, name = keep(llama_server, attached, storage, ids, computed)

    other = serve(
        checkpoint("llama", seed=1),
        served_model_name="tiny-llama",
        storage="cachestore",
        extra_config=f"@{SHIPPED}",
        env={"XDG_CACHE_HOME": str(tmp_path)},
    )
    second = computed(other, ids)
    assert second.tokens != first.tokens
    storage.wait(2 * PAGES)
    restored(other, ids, STORED, second)
    manifests = storage.manifests()
    assert differences(*manifests.values()) == {"model_path", "variant"}
    other.kill()

    with attached(llama_server, "cachestore", storage.config()):
        restored(llama_server, ids, STORED, first)
    assert manifests == storage.manifests() and name in manifests


@pytest.mark.soak
def test_another_path_and_name(
    llama_server, attached, storage, checkpoint, serve, tmp_path, prompt, computed, restored
):
    """Pinned: a copy served under another name shares nothing, and all with ``model_identity``."""
    ids = prompt(PROMPT, seed=61)
    first, _ = keep(llama_server, attached, storage, ids, computed)
    copy = tmp_path / "a copy"
    shutil.copytree(checkpoint("llama"), copy)
    other = serve(copy, served_model_name="copy")
    with attached(other, "cachestore", storage.config()):
        assert computed(other, ids).same_output(first)  # the weights are the same
        storage.wait(2 * PAGES)
    assert differences(*storage.manifests().values()) == {"model_path", "served_model_name"}

    said = storage.config(model_identity="tiny weights")
    _, shared = keep(llama_server, attached, storage, ids, computed, model_identity="tiny weights")
    with attached(other, "cachestore", said):
        restored(other, ids, STORED, first)
    other.kill()
    assert "model_path" not in storage.manifests()[shared]
    assert len(storage.manifests()) == 3
    with attached(llama_server, "cachestore", storage.config()):
        restored(llama_server, ids, STORED, first)


def test_another_dtype_page_size_layout_and_name(
    llama_server, unplugged_server, attached, prompt, computed, restored
):
    """Pinned: each of these is in the identity of a running server, and together they miss.

    That each alone is a miss is pinned by the unit tests of identities, and here in the soak run.
    """
    other, storage, config = unplugged_server
    ids = prompt(PROMPT, seed=62)
    first, mine = keep(llama_server, attached, storage, ids, computed)
    if other.show()["hicache_storage_backend"] is not None:
        other.detach()
    expected = computed(other, ids)
    with attached(other, "dynamic", config):
        assert computed(other, ids).same_output(expected)
    manifests = storage.manifests()
    (theirs,) = set(manifests) - {mine}
    assert differences(manifests[mine], manifests[theirs]) == {
        "dtype",
        "layout",
        "page_size",
        "served_model_name",
        "tensor_sizes",
    }
    assert manifests[theirs]["dtype"] == "bfloat16"
    with attached(llama_server, "cachestore", storage.config()):
        restored(llama_server, ids, STORED, first)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("started", "fields"),
    [
        ({"dtype": "bfloat16"}, {"dtype", "tensor_sizes"}),
        ({"page_size": 32}, {"page_size", "tensor_sizes"}),
        ({"served_model_name": "another"}, {"served_model_name"}),
        ({"layout": "layer_first"}, {"layout", "tensor_sizes"}),
    ],
    ids=lambda value: "-".join(value),
)
def test_each_alone(
    started, fields, llama_server, attached, storage, serve, prompt, computed, restored
):
    """Pinned: one difference is enough for a miss, and the first cache stays as it was."""
    ids = prompt(PROMPT, seed=63)
    first, _ = keep(llama_server, attached, storage, ids, computed)
    other = serve("llama", **{"served_model_name": "tiny-llama"} | started)
    expected = computed(other, ids)
    with attached(other, "cachestore", storage.config()):
        assert computed(other, ids).same_output(expected)
    assert differences(*storage.manifests().values()) == fields
    with attached(llama_server, "cachestore", storage.config()):
        restored(llama_server, ids, STORED, first)
