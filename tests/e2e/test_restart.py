"""A server that ends in the middle of a backup, and the one that is started after it.

All tests hold the backup half done by a latch: a name at which the store is about to write a
temporary file (docs/format.md) is a FIFO, whose open waits until somebody reads it.
"""

import contextlib
import os
import threading
from pathlib import Path

import pytest

PROMPT = 690
STORED = 640
PAGES = 10
PAGE = 64

# Of ten names in a row, two are latches: of four dump workers two wait, and eight pages pass.
EVERY = 5
HELD = 2


def plant(storage):
    """Latches among the next temporary files of the only store that writes in ``storage``."""
    (instance,) = storage.root.glob("*/tmp/*")
    latches = []
    for number in range(4, 200, EVERY):
        latch = instance / str(number)
        if not latch.exists():
            os.mkfifo(latch)
            latches.append(latch)
    return instance, latches


@contextlib.contextmanager
def released(latches):
    """Inside the ``with``, nobody waits at a latch."""
    with contextlib.ExitStack() as readers:
        for latch in latches:
            # Once the last one has passed, the store goes on and removes what is left of them.
            with contextlib.suppress(FileNotFoundError):
                readers.callback(os.close, os.open(latch, os.O_RDONLY | os.O_NONBLOCK))
        yield


def half_stored(server, storage, ids, computed):
    """Ask a prompt, whose backup then waits; returns the answer and what holds the backup."""
    from rig.server import poll

    before = len(storage.blocks())
    instance, latches = plant(storage)
    answer = computed(server, ids)
    enough = before + PAGES - HELD
    poll(lambda: len(storage.blocks()) >= enough, 30, "all pages but those that are held")
    assert len(storage.blocks()) == enough
    return answer, instance, latches


def prove(server, attached, storage, complete, torn, restored):
    """The next life: what was whole is there, what was not is computed, and is stored then."""
    # SGLang asks for four pages or more, unless told to ask for fewer.
    config = storage.config(prefetch_threshold=PAGE, store_pipeline="Posix")
    with attached(server, "cachestore", config):
        restored(server, *complete)
        ids, expected = torn
        present = [path.exists() for path in storage.pages(ids)]
        assert sum(present) == PAGES - HELD
        restored(server, ids, present.index(False) * PAGE, expected)
        storage.wait(2 * PAGES)
        restored(server, ids, STORED, expected)


def test_sigterm_in_the_middle_of_a_backup(
    llama_server, attached, storage, prompt, computed, restored
):
    """Pinned: SIGTERM ends a server within its time, the store first and whole.

    The page being written when the store is closed is waited for; no file of this store's is left
    but published blocks; the next server finds them.
    """
    from rig.server import poll

    server = llama_server
    (pid,) = server.pids()
    first, second = prompt(PROMPT, seed=70), prompt(PROMPT, seed=71)
    try:
        with attached(server, "cachestore", storage.config()):
            cold = computed(server, first)
            storage.wait(PAGES)
            torn, instance, latches = half_stored(server, storage, second, computed)
            stopping = threading.Thread(target=server.stop, kwargs={"timeout": 60})
            stopping.start()
            try:
                # SGLang looks for a signal every five seconds, then tells the scheduler to end.
                poll(lambda: not workers(pid, "cs-load"), 30, "the store being closed")
                assert workers(pid, "cs-dump")
            finally:
                with released(latches):
                    stopping.join(90)
        assert not instance.exists()
        assert len(storage.blocks()) == 2 * PAGES - HELD
        assert "Schedulers still alive" not in server.log_text()
    finally:
        if not server.alive():
            server.start()
    prove(server, attached, storage, (first, STORED, cold), (second, torn), restored)


@pytest.mark.soak
def test_sigkill_in_the_middle_of_a_backup(
    deepseek_server, attached, storage, prompt, computed, restored
):
    """Pinned: what SIGKILL left half written is never served, and is cleared away (F07).

    The temporary files of a store that lives are left alone.
    """
    from rig.server import poll

    server = deepseek_server
    first, second = prompt(PROMPT, seed=72), prompt(PROMPT, seed=73)
    try:
        with attached(server, "cachestore", storage.config(store_pipeline="Posix")):
            cold = computed(server, first)
            storage.wait(PAGES)
            torn, instance, latches = half_stored(server, storage, second, computed)
            server.kill()
        assert all(latch.exists() for latch in latches[-HELD:])
        assert len(storage.blocks()) == 2 * PAGES - HELD
    finally:
        if not server.alive():
            server.start()
    prove(server, attached, storage, (first, STORED, cold), (second, torn), restored)
    poll(lambda: not instance.exists(), 30, "the temporary files of the dead being removed")


def test_an_mla_model_keeps_what_it_had_in_memory(
    deepseek_server, attached, storage, prompt, computed, restored, new_log, counted
):
    """Pinned: by itself an MLA model has Cache|Posix, in each of its lives.

    While it lives, what was dumped is served from memory. Detached and attached, each page is read
    once. SIGKILL leaves the buffer behind, with two pages that are in no file yet: the next attach
    stores them, and then nothing of ours is left there. (A slot counts as stored with its request.)
    """
    server = deepseek_server
    lines = new_log(server)
    first, second = prompt(PROMPT, seed=74), prompt(PROMPT, seed=75)
    with attached(server, "cachestore", storage.config()):
        assert any("pipeline Cache|Posix (store_pipeline is not set" in line for line in lines())
        assert len(storage.regions()) == 1
        cold = computed(server, first)
        storage.wait(PAGES)
        restored(server, first, STORED, cold)
    (life,) = counted(lines())
    assert (life["load_ok"], life["cache_hit"]) == (PAGES, PAGES)
    assert "storage_loads" not in life
    assert storage.regions() == []
    lines = new_log(server)
    try:
        with attached(server, "cachestore", storage.config()):
            restored(server, first, STORED, cold)
            torn, *_ = half_stored(server, storage, second, computed)
            restored(server, second, STORED, torn)  # the whole prompt is in memory
            server.kill()
        assert len(storage.blocks()) == 2 * PAGES - HELD
        assert len(storage.regions()) == 1
    finally:
        if not server.alive():
            server.start()
    with attached(server, "cachestore", storage.config()):
        saved = f"stored {PAGES} of {PAGES} blocks that processes now gone had only in memory"
        assert any(saved in line for line in lines())
        assert len(storage.blocks()) == 2 * PAGES
        restored(server, first, STORED, cold)
        restored(server, second, STORED, torn)
    (life,) = counted(lines())
    assert life["load_ok"] == life["storage_loads"] == life["cache_loaded"] == 2 * PAGES
    assert life["storage_dumps"] == HELD  # the others were there
    assert storage.regions() == []


def workers(pid, name):
    """Threads of the store in the scheduler, by their name; none once it is gone."""
    tasks = Path(f"/proc/{pid}/task")
    found = []
    for comm in tasks.glob("*/comm"):
        try:
            found.append(comm.read_text().strip())
        except OSError:  # ended since
            continue
    return [each for each in found if each.startswith(name)]
