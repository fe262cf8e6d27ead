"""A storage directory with less room than the prompts want: eviction under the real server."""

PROMPT = 690
STORED = 640
PAGES = 10
PAGE = 64
ROOM = 16  # pages


def on_disk(paths):
    """Bytes that files take."""
    return sum(path.stat().st_blocks * 512 for path in paths)


def test_the_end_of_the_oldest_prompt_goes_first(
    llama_server, attached, storage, prompt, computed, restored, new_log, counted
):
    """Pinned: never more than the capacity; of the prompt longest unused the beginning stays.

    What is left of it is served, the rest is computed and stored anew; tokens stay right (F33).
    """
    from rig.server import poll

    server = llama_server
    old, new = prompt(PROMPT, seed=80), prompt(PROMPT, seed=81)
    with attached(server, "cachestore", storage.config()):
        cold = computed(server, old)
        storage.wait(PAGES)
    capacity = ROOM * on_disk(storage.pages(old)[:1])
    assert on_disk(storage.pages(old)) == capacity * PAGES // ROOM
    # SGLang asks for four pages or more, unless told to ask for fewer.
    config = storage.config(posix_capacity_gb=capacity / 2**30, prefetch_threshold=PAGE)
    everything = "*/blocks/*/*"

    def settled():
        return on_disk(storage.root.glob(everything)) <= capacity * 97 // 100

    lines = new_log(server)
    with attached(server, "cachestore", config):
        restored(server, old, STORED, cold)
        expected = server.generate(new)
        for _ in range(PAGES):  # what was refused for want of room is stored once there is some
            poll(settled, 30, "usage below the high watermark")
            if all(path.exists() for path in storage.pages(new)):
                break
            server.flush()
            assert server.generate(new).same_output(expected, 4)
        present = [path.exists() for path in storage.pages(old)]
        assert 0 < sum(present) < PAGES
        assert present == sorted(present, reverse=True)
        restored(server, new, STORED, expected)
        server.flush()
        answer = server.generate(old)
        assert answer.same_output(cold, 4)
        assert answer.storage in range(PAGE, sum(present) * PAGE + 1, PAGE)
        assert on_disk(storage.root.glob(everything)) <= capacity
    (life,) = counted(lines())
    assert life["evicted_blocks"] >= PAGES - sum(present)
