"""The main job: pages stored while serving come back later, and the output is the same."""

import pytest

# 10 pages of 64 tokens, and a rest that fills no page even with the 8 tokens of an answer.
PROMPT = 690
STORED = 640
PAGES = 10

CLASS = {
    "backend_name": "cachestore",
    "module_path": "cachestore_connector.backend",
    "class_name": "CacheStore",
}


def test_stored_and_restored(shared_server, attached, storage, prompt, computed, restored):
    """Pinned: what was computed is stored, and read again once L1 and L2 have lost it.

    The last page is one that the prompt began and the answer filled. A longer prompt takes the
    pages it shares and computes the rest; another prompt takes none.
    """
    ids = prompt(700, seed=10)
    with attached(shared_server, "cachestore", storage.config()) as server:
        assert server.show()["hicache_storage_backend"] == "cachestore"
        cold = computed(server, ids)
        storage.wait(PAGES + 1)
        assert storage.blocks() == sorted(storage.pages([*ids, *cold.tokens]))
        restored(server, ids, STORED, cold)
        again = server.generate(ids)
        assert (again.device, again.storage) == (STORED, 0)  # it is in L1 now

        longer = ids[:STORED] + prompt(PROMPT, seed=11)
        server.flush()
        extended = server.generate(longer)
        assert extended.storage == STORED
        storage.wait(2 * PAGES + 1)
        restored(server, longer, 2 * STORED, extended)
        computed(server, prompt(PROMPT, seed=12))


def test_shared_between_the_plugins_way_and_sglangs_own(
    shared_server, attached, storage, prompt, computed, restored
):
    """Pinned: all three ways of using the class read each other's blocks, byte for byte.

    SGLang's generic path hands over flat pages, which must be stored as zero-copy ones are.
    """
    server, config = shared_server, storage.config()
    ids = [prompt(PROMPT, seed=13 + way) for way in range(3)]
    ways = [
        ("cachestore", config),
        ("dynamic", config | CLASS | {"interface_v1": 1}),
        ("dynamic", config | CLASS),
    ]
    cold = []
    for way, (backend, extra) in enumerate(ways):
        with attached(server, backend, extra):
            cold.append(computed(server, ids[way]))
            storage.wait(PAGES * (way + 1))
    for backend, extra in ways:
        with attached(server, backend, extra):
            for each, answer in zip(ids, cold, strict=True):
                restored(server, each, STORED, answer)
    assert len(storage.manifests()) == 1


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_prefetch_policies(policy, shared_server, attached, storage, prompt, computed):
    """Pinned: policies that may cut a load short cost hits at most, never the right output."""
    ids = prompt(PROMPT, seed=16)
    with attached(
        shared_server, "cachestore", storage.config(), hicache_storage_prefetch_policy=policy
    ) as server:
        cold = computed(server, ids)
        storage.wait(PAGES)
        for _ in range(5):
            server.flush()
            answer = server.generate(ids)
            assert answer.storage in range(0, STORED + 1, 64)
            assert answer.same_output(cold)
