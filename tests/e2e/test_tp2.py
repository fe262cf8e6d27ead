"""Two tensor-parallel ranks: each stores its own pages (MHA), or one for both (MLA)."""

import pytest

PROMPT = 690
STORED = 640
PAGES = 10
PAGE = 64


def prove(server, storage, ids, count, computed, restored):
    """Cold, restored; then with a page missing, which for MHA is one rank's only."""
    assert len(server.pids()) == 2
    cold = computed(server, ids)
    storage.wait(count)
    restored(server, ids, STORED, cold)
    last = sorted(storage.manifests())[-1]
    storage.pages(ids, identity=last)[6].unlink()
    restored(server, ids, 6 * PAGE, cold)  # the ranks agree on what both have
    storage.wait(count)
    restored(server, ids, STORED, cold)
    return cold


def test_mha_ranks_store_their_own(
    llama_server, attached, serve, storage, prompt, computed, restored
):
    """Pinned: both ranks' pages are stored and restored, and are nothing to a server of one."""
    ids = prompt(PROMPT, seed=80)
    server = serve(
        "llama",
        tp=2,
        served_model_name="tiny-llama",
        storage="cachestore",
        extra_config=storage.config(),
    )
    cold = prove(server, storage, ids, 2 * PAGES, computed, restored)
    server.kill()
    ranks = storage.manifests()
    assert sorted(manifest["tp_rank"] for manifest in ranks.values()) == [0, 1]
    for name in ranks:
        assert len(storage.blocks(name)) == PAGES
    with attached(llama_server, "cachestore", storage.config()):
        alone = computed(llama_server, ids)
        assert alone.tokens == cold.tokens  # two ranks add up in another order
        storage.wait(3 * PAGES)


def ended(lines, counted):
    """What each rank counted; SGLang answers a detach when the first of them has closed."""
    from rig.server import poll

    poll(lambda: len(counted(lines())) == 2, 30, "both ranks' stores being closed")
    return counted(lines())


def test_mla_ranks_read_each_page_once(
    serve, attached, storage, prompt, computed, restored, new_log, counted
):
    """Pinned: two ranks share one buffer: for both together each page is read from storage once."""
    ids = prompt(PROMPT, seed=82)
    server = serve("deepseek", tp=2)
    lines = new_log(server)
    with attached(server, "cachestore", storage.config()):
        assert len(storage.regions()) == 1
        cold = computed(server, ids)
        storage.wait(PAGES)
        restored(server, ids, STORED, cold)
    lives = ended(lines, counted)
    assert sorted(life.get("dump_ok", 0) > 0 for life in lives) == [False, True]
    assert sum(life["cache_hit"] for life in lives) == 2 * PAGES
    assert not any("storage_loads" in life for life in lives)
    assert storage.regions() == []

    lines = new_log(server)
    with attached(server, "cachestore", storage.config()):
        restored(server, ids, STORED, cold)
        restored(server, ids, STORED, cold)
    lives = ended(lines, counted)
    assert [life["load_ok"] for life in lives] == [2 * PAGES] * 2
    assert sum(life.get("storage_loads", 0) for life in lives) == PAGES
    assert storage.regions() == []
    server.kill()  # SGLang takes a quarter of a minute to end two ranks


@pytest.mark.soak
@pytest.mark.timeout(900)  # two starts of two ranks
@pytest.mark.parametrize(("name", "count"), [("llama", 2 * PAGES), ("deepseek", PAGES)])
def test_restart(name, count, serve, storage, prompt, computed, restored):
    """Pinned: the same after a restart; MLA ranks have one set of pages between them."""
    ids = prompt(PROMPT, seed=81)
    # Without a buffer: pages are taken away from the files.
    config = storage.config(store_pipeline="Posix")
    settings = {"tp": 2, "storage": "cachestore", "extra_config": config}
    server = serve(name, **settings)
    cold = prove(server, storage, ids, count, computed, restored)
    assert len(storage.manifests()) == count // PAGES
    server.kill()
    server.start()
    restored(server, ids, STORED, cold)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_mla_restart(serve, storage, prompt, computed, restored, new_log, counted):
    """Pinned: two ranks killed and started again find one buffer, and leave none when they end."""
    ids = prompt(PROMPT, seed=83)
    server = serve("deepseek", tp=2, storage="cachestore", extra_config=storage.config())
    cold = computed(server, ids)
    storage.wait(PAGES)
    restored(server, ids, STORED, cold)
    server.kill()
    assert len(storage.regions()) == 1
    lines = new_log(server)
    server.start()
    restored(server, ids, STORED, cold)
    server.flush()
    server.detach()
    lives = ended(lines, counted)
    assert [life["load_ok"] for life in lives] == [PAGES] * 2
    assert sum(life.get("storage_loads", 0) for life in lives) == PAGES
    assert storage.regions() == []
