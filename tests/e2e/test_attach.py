"""Attaching, detaching and clearing over HTTP, on a live server."""

import collections
import contextlib
import os
from pathlib import Path

import pytest

from command_line import invoke

PROMPT = 690
STORED = 640
PAGES = 10


def threads(pid):
    """How many threads of each name a process has."""
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # ended since it was listed
            names.append((task / "comm").read_text().strip())
    return collections.Counter(names)


def descriptors(pid):
    """What the descriptors of a process lead to, sockets and pipes by kind."""
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            targets.append(os.readlink(descriptor).split(":[")[0])
    return collections.Counter(targets)


def settled(pid):
    """Threads and descriptors, once what is ending has ended: the same at a few looks in a row."""
    from rig.server import poll

    looks = collections.deque(maxlen=5)

    def same():
        looks.append((threads(pid), descriptors(pid)))
        return len(looks) == looks.maxlen and all(look == looks[0] for look in looks)

    poll(same, 30, "threads and descriptors that stay the same")
    return looks[0]


def gained(pid, before):
    """What the process has now and hadn't before."""
    return [now - then for now, then in zip(settled(pid), before, strict=True)]


def test_threads_and_descriptors_come_back(
    shared_server, attached, storage, prompt, computed, restored
):
    """Pinned: attached and used twice in a row, the scheduler has after each what it had before.

    SGLang keeps a few things of its own from a first attach, so the measure is taken after one.
    """
    server = shared_server
    (pid,) = server.pids()
    ids = prompt(PROMPT, seed=30)
    with attached(server, "file"):
        for _ in range(2):
            server.generate(prompt(PROMPT, seed=31))
            server.flush()
    before = settled(pid)

    with attached(server, "cachestore", storage.config()):
        cold = computed(server, ids)
        storage.wait(PAGES)
        assert sum(threads(pid).values()) > sum(before[0].values())
        assert any(str(storage.root) in target for target in descriptors(pid))  # the lock
    assert not any(gained(pid, before))
    assert storage.temporaries() == []

    with attached(server, "cachestore", storage.config()):
        restored(server, ids, STORED, cold)
    assert not any(gained(pid, before))
    computed(server, ids)  # detached, the storage isn't asked


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"storage_backend": "/tmp"}, ["storage_backend", "did you mean storage_backends"]),
        ({"timeout_ms": "soon"}, ["timeout_ms", "'soon'", "100 to 3600000"]),
        ({"posix_queue_depth": 8}, ["posix_queue_depth", "8", "128"]),
        ({"storage_backends": "relative/path"}, ["storage_backends", "relative/path"]),
        ({"tensor_size_list": [1, 2]}, ["tensor_size_list", "[1, 2]", "the host pool's own"]),
        ({"shard_size": 4096}, ["shard_size", "4096", "the host pool's own"]),
        ({"storage_backends": "/proc/nowhere"}, ["/proc/nowhere"]),
        ({"use_gdr": True}, ["use_gdr", "true", "cache_use_host_buffer"]),
        (
            {"store_pipeline": "Cache|Posix", "cache_buffer_capacity_gb": 10**6},
            ["cache_buffer_capacity_gb", "wants 1024000000 MiB", "available", "--shm-size"],
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, named, llama_server, storage):
    """Pinned: who attaches is told the setting, the value and what is allowed (F32)."""
    from rig.server import ServerError

    with pytest.raises(ServerError, match="HTTP 400") as refused:
        llama_server.attach("cachestore", storage.config() | settings)
    for text in named:
        assert text in str(refused.value)
    assert llama_server.show()["hicache_storage_backend"] is None


def test_a_refused_attach_leaves_nothing(
    llama_server, attached, storage, prompt, computed, restored
):
    """Pinned: after a refused attach the server serves on, and a right one takes."""
    from rig.server import ServerError

    (pid,) = llama_server.pids()
    ids = prompt(PROMPT, seed=32)
    with attached(llama_server, "cachestore", storage.config()):  # SGLang's own first-time threads
        cold = computed(llama_server, ids)
        storage.wait(PAGES)
    before = settled(pid)
    with pytest.raises(ServerError, match="timeout_ms"):
        llama_server.attach("cachestore", storage.config(timeout_ms=0))
    # The store is the last to be opened: what was wrong is seen then at the earliest.
    with pytest.raises(ServerError, match="block_size"):
        llama_server.attach("cachestore", storage.config(block_size=4096))
    assert not any(gained(pid, before))
    assert computed(llama_server, ids).same_output(cold)
    with attached(llama_server, "cachestore", storage.config()):
        restored(llama_server, ids, STORED, cold)


def test_clear_takes_one_identitys_blocks(
    llama_server, attached, storage, prompt, computed, restored
):
    """Pinned: clearing a live server's storage empties its own cache, not a neighbour's."""
    server, ids = llama_server, prompt(PROMPT, seed=33)
    ours, theirs = storage.config(model_identity="ours"), storage.config(model_identity="theirs")
    with attached(server, "cachestore", theirs):
        cold = computed(server, ids)
        storage.wait(PAGES)
    with attached(server, "cachestore", ours):
        restored(server, ids, 0, cold)
        storage.wait(2 * PAGES)
        storage.wait(PAGES, identity="ours-*")
        server.clear()
        assert storage.blocks("ours-*") == []
        assert len(storage.blocks("theirs-*")) == PAGES
        restored(server, ids, 0, cold)
        storage.wait(PAGES, identity="ours-*")
        restored(server, ids, STORED, cold)
    with attached(server, "cachestore", theirs):
        restored(server, ids, STORED, cold)


def test_clear_by_the_command_line(deepseek_server, attached, storage, prompt, computed, restored):
    """Pinned: `cachestore clear` empties files and the buffer of a server that runs."""
    server, ids = deepseek_server, prompt(PROMPT, seed=34)
    with attached(server, "cachestore", storage.config()):
        cold = computed(server, ids)
        storage.wait(PAGES)
        done = invoke("clear", "--store", storage.root, "--identity", "all", "--yes")
        assert done.exit_code == 0, done.output
        assert storage.blocks() == []
        restored(server, ids, 0, cold)
        storage.wait(PAGES)  # what was in the buffer isn't taken for stored
        restored(server, ids, STORED, cold)
