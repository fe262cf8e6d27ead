"""Without the plugin, through SGLang's own ``dynamic`` backend, in layout layer_first."""

import pytest

PAGE = 32  # the server's

# In bfloat16, attention over restored pages rounds otherwise than the prefill of a whole prompt.
DIGITS = 1

CLASS = {
    "backend_name": "cachestore",
    "module_path": "cachestore_connector.backend",
    "class_name": "CacheStore",
}


def test_without_the_plugin(unplugged_server, attached, prompt, computed, restored):
    """Pinned: both of SGLang's own ways of calling the class read what either of them stored.

    In layer_first the tensors of a page alternate between K and V, while a flat page holds all of
    K first: it must be taken apart and put together in that order.
    """
    from rig.server import ServerError

    server, storage, config = unplugged_server
    before = len(storage.blocks())
    first, second = prompt(10 * PAGE + 10, seed=50), prompt(10 * PAGE + 10, seed=51)
    flat = {key: value for key, value in config.items() if key != "interface_v1"}

    if server.show()["hicache_storage_backend"] is None:  # another test was first
        server.attach("dynamic", config)
    cold = computed(server, first)
    storage.wait(before + 10)
    first_hit = restored(server, first, 10 * PAGE, cold, DIGITS)
    server.detach()
    with pytest.raises(ServerError, match="Unknown storage backend 'cachestore'"):
        server.attach("cachestore", storage.config())  # the plugin's name isn't known here
    with attached(server, "dynamic", flat):
        restored(server, first, 10 * PAGE, first_hit)
        cold = computed(server, second)
        storage.wait(before + 20)
        second_hit = restored(server, second, 10 * PAGE, cold, DIGITS)
    with attached(server, "dynamic", config):
        restored(server, second, 10 * PAGE, second_hit)


@pytest.mark.soak
def test_mla_layer_first(serve, attached, storage, prompt, computed, restored):
    """Pinned: the same for MLA, with the plugin."""
    server = serve("deepseek", layout="layer_first")
    ids = prompt(690, seed=52)
    with attached(server, "cachestore", storage.config()):
        cold = computed(server, ids)
        storage.wait(10)
        restored(server, ids, 640, cold)
    with attached(server, "dynamic", CLASS | storage.config()):
        restored(server, ids, 640, cold)
