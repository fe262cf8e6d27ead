"""Weights that are replaced on a live server."""

import pytest

from rig.server import ServerError

PROMPT = 690
STORED = 640
PAGES = 10


@pytest.mark.soak
def test_pages_of_the_old_weights_are_not_served(
    serve, storage, checkpoint, prompt, computed, restored, new_log
):
    """Pinned (F22): SGLang empties L1 and L2 after an update, and tells a backend nothing.

    So what is stored is left alone until the backend is attached again, which takes a weight
    version, and then it is another identity's.
    """
    ids = prompt(PROMPT, seed=90)
    server = serve("llama", storage="cachestore", extra_config=storage.config())
    old = computed(server, ids)
    storage.wait(PAGES)
    restored(server, ids, STORED, old)

    lines = new_log(server)
    server.update_weights(checkpoint("llama", seed=1))
    new = computed(server, ids)
    assert new.tokens != old.tokens
    assert computed(server, ids).same_output(new)
    assert any("weights were updated" in line for line in lines())
    assert len(storage.manifests()) == 1

    server.flush()
    server.detach()
    with pytest.raises(ServerError, match="weight_version"):
        server.attach("cachestore", storage.config())
    server.update_weights(checkpoint("llama", seed=1), weight_version="second")
    server.attach("cachestore", storage.config())
    assert computed(server, ids).same_output(new)
    storage.wait(2 * PAGES)
    restored(server, ids, STORED, new)
    assert len(storage.manifests()) == 2
