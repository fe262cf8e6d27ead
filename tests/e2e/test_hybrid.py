"""A model with two pools on the real server: full attention's KV, and a sliding window's.

SGLang stores a window (`swa`, two pages here) only where a prefix ended when it was computed, and
restores a prefix up to where both pools have what it needs.
"""

import pytest

PAGE = 64
PAGES = 10
PROMPT = PAGES * PAGE + 50  # and the 8 tokens of an answer fill no eleventh page
SHORT, LONG = PAGES * PAGE, 2 * PAGES * PAGE
WINDOWS = 4  # pages of the two prompts' windows

CLASS = {
    "backend_name": "cachestore",
    "module_path": "cachestore_connector.backend",
    "class_name": "CacheStore",
}


def of_pool(storage, name):
    """The directory of a pool's blocks."""
    (directory,) = (d for d, m in storage.manifests().items() if m["pool"] == name)
    return directory


def stored(server, storage, prompt, computed, seed):
    """A prompt, and a longer one that begins with it, stored: (ids, answer) of the longer."""
    short = prompt(PROMPT, seed)
    ids = short[:SHORT] + prompt(PROMPT, seed + 1)
    computed(server, short)
    storage.wait(PAGES + 2)
    answer = server.generate(ids)
    assert (answer.device, answer.storage) == (SHORT, 0)
    storage.wait(2 * PAGES + WINDOWS)
    pages = storage.pages(ids, identity=of_pool(storage, "kv"))
    assert storage.blocks(of_pool(storage, "kv")) == sorted(pages)
    windows = storage.pages(ids, identity=of_pool(storage, "swa"))
    ends = [*windows[PAGES - 2 : PAGES], *windows[2 * PAGES - 2 :]]
    assert storage.blocks(of_pool(storage, "swa")) == sorted(ends)
    return ids, answer, windows


@pytest.mark.parametrize(
    ("backend", "extra"), [("cachestore", {}), ("dynamic", CLASS | {"interface_v1": 1})]
)
def test_stored_and_restored(
    mellum_server, attached, storage, prompt, computed, restored, backend, extra
):
    """Pinned: both pools are stored and restored, and the output is what it was, either way."""
    with attached(mellum_server, backend, storage.config() | extra) as server:
        ids, cold, _ = stored(server, storage, prompt, computed, seed=50)
        restored(server, ids, LONG, cold)
        # Another prompt that begins so: the shorter one's window is inside, and its end is stored.
        other = ids[:SHORT] + prompt(PROMPT, seed=52)
        server.flush()
        answer = server.generate(other)
        assert answer.storage == SHORT
        computed(server, prompt(PROMPT, seed=53))


def test_a_window_that_is_gone_or_damaged(
    mellum_server, attached, storage, prompt, computed, restored
):
    """Pinned: a shorter prefix or none, and the same tokens; what is missing is stored anew."""
    with attached(mellum_server, "cachestore", storage.config()) as server:
        ids, cold, windows = stored(server, storage, prompt, computed, seed=60)
        windows[-1].unlink()
        restored(server, ids, SHORT, cold)
        storage.wait(2 * PAGES + WINDOWS)
        restored(server, ids, LONG, cold)
        # A lookup doesn't read: the load finds it, and SGLang takes nothing of the prefix.
        windows[-2].write_bytes(windows[-2].read_bytes()[:-5000] + bytes(5000))
        restored(server, ids, 0, cold)
        storage.wait(2 * PAGES + WINDOWS)
        restored(server, ids, LONG, cold)


def test_cleared_together(mellum_server, attached, storage, prompt, computed):
    """Pinned: SGLang's clear forgets the blocks of both pools."""
    with attached(mellum_server, "cachestore", storage.config()) as server:
        ids, _, _ = stored(server, storage, prompt, computed, seed=70)
        server.clear()
        storage.wait(0)
        computed(server, ids)


@pytest.mark.soak
@pytest.mark.parametrize("tp", [1, 2])
def test_restored_by_another_server(tp, serve, storage, prompt, computed, restored):
    """Pinned: what a server that was killed has stored is restored by the next; also two ranks."""
    server = serve("mellum", tp=tp, storage="cachestore", extra_config=storage.config())
    short = prompt(PROMPT, 80)
    cold = computed(server, short)
    storage.wait(tp * (PAGES + 2))
    server.kill()
    server.start()
    restored(server, short, SHORT, cold)


@pytest.mark.soak
def test_load_backs_on_the_loader_thread(serve, storage, tmp_path, prompt, computed, restored):
    """Pinned: with the async-load switch both pools are loaded there, output unchanged."""
    loads = tmp_path / "loads"
    loads.mkdir()
    server = serve(
        "mellum",
        storage="cachestore",
        extra_config=storage.config(),
        env={"SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE": "1", "CACHESTORE_RIG_LOADS": str(loads)},
    )
    assert "HiCache async load enqueue: enabled (HybridCacheController)" in server.log_text()
    ids, cold, _ = stored(server, storage, prompt, computed, seed=90)
    for _ in range(3):
        restored(server, ids, LONG, cold)
    trace = [line.split() for line in (loads / "trace").read_text().splitlines()]
    enqueued = [tuple(words[1:3]) for words in trace if words[0] == "enqueued"]
    assert {thread for _, thread in enqueued} == {"hicache-load-enqueue"}
    for layer in range(4):
        assert sum(each == str(layer) for each, _ in enqueued) == 3
