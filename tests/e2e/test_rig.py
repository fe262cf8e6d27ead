"""The rig proves itself before anything is concluded from it.

With SGLang's own ``file`` backend: the output of a storage hit is that of a cold run, and it
changes when the stored pages do. A rig whose output doesn't depend on its KV would pass every
comparison of tokens.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import cachestore_rig
import psutil
import pytest

PAGE = 64
# Eight more tokens don't fill an eleventh page, so every stored page belongs to the prompt.
PROMPT = 10 * PAGE + 50


def prove(server, storage: Path, ids, files: int) -> None:
    """Cold, restored, restored from exchanged and from replaced pages, and from the right ones.

    Attention adds up over the cached tokens, and a key carries its own position: two exchanged
    pages change nothing for a prompt that has both. A prompt that ends between them does see it.
    """
    from rig.server import poll

    keys = cachestore_rig._page_hashes(ids, 10 * PAGE, 1, False, None, PAGE)
    half = ids[: 5 * PAGE + 50]

    def restored(prompt):
        server.flush()
        answer = server.generate(prompt)
        assert (answer.device, answer.host) == (0, 0)
        assert answer.storage == len(prompt) // PAGE * PAGE
        assert answer.storage_backend == "HiCacheFile"
        return answer

    def page(i):
        return sorted(storage.glob(f"{keys[i]}_*.bin"))

    def write(i, contents):
        for path, content in zip(page(i), contents, strict=True):
            path.write_bytes(content)

    cold = server.generate(ids)
    assert (cold.device, cold.host, cold.storage) == (0, 0, 0)
    assert len(cold.tokens) == len(cold.logprobs) == 8
    poll(lambda: len(list(storage.glob("*.bin"))) >= files, 30, f"{files} files in {storage}")
    assert restored(ids).same_output(cold)
    right = restored(half)

    first, last = ([path.read_bytes() for path in page(i)] for i in (0, 9))
    write(0, last)
    write(9, first)
    exchanged = restored(half)
    assert exchanged.tokens != right.tokens or not exchanged.same_output(right, digits=2)

    write(0, first)  # and the tenth page still holds the first one's bytes
    replaced = restored(ids)
    assert replaced.tokens != cold.tokens or not replaced.same_output(cold, digits=2)

    write(9, last)
    assert restored(ids).same_output(cold)
    print(f"cold      {cold.tokens} {cold.logprobs}")
    print(f"replaced  {replaced.tokens} {replaced.logprobs}")
    print(f"half      {right.tokens} {right.logprobs}")
    print(f"exchanged {exchanged.tokens} {exchanged.logprobs}")


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_a_swapped_page_changes_the_output(name, request, attached, file_storage, prompt):
    """Pinned: the output of both models depends on the bytes that storage gives back."""
    server = request.getfixturevalue(f"{name}_server")
    with attached(server, "file"):
        prove(server, file_storage[name], prompt(PROMPT, seed=1), files=10)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "files"), [("llama", 20), ("deepseek", 10)])
def test_a_swapped_page_changes_the_output_tp2(name, files, serve, tmp_path, prompt):
    """Pinned: the same with two ranks. MHA ranks store their own pages, MLA ranks share them."""
    storage = tmp_path / "file"
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}
    server = serve(name, tp=2, storage="file", env=env)
    assert len(server.pids()) == 2
    prove(server, storage, prompt(PROMPT, seed=2), files)


def test_page_keys_are_sglangs():
    """Pinned: the rig's page hash against values that SGLang's compiled one gave."""
    tokens = list(range(2, 132))
    assert cachestore_rig._page_hashes(tokens, 130, 1, False, None, 64) == [
        "0b3705f3892c537c1a33a14fe07ce60a0cecc72280cea810fa0dbcd4b9d6b766",
        "bcdda65c0985967eb71f48f39a0aab1d1fad3b3f4a0ed1198273574e25bd1157",
        "edca34a50d37ccce00aeea1c5d5ced15ea7dcee62ddff76a25d9136ab2a44af2",
    ]
    seeded = cachestore_rig._page_hashes(tokens, 130, 1, False, bytes.fromhex("ab" * 32), 64)
    assert seeded[0] == "8bc12e535dce5f8cb230769456eddcd38aab0b85196c76252d74d9143d31898a"
    assert cachestore_rig._page_hashes([5, 6, 7], 3, 1, False, None) == (
        "2e4c4603cb0dea8636f8e802bfa0f24caef5f9943377f91d89fd6fbd9577cd1c"
    )


_PARENT = """
import os, sys, time
from pathlib import Path
from rig._process import Tree
log = Path(sys.argv[1])
Tree([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
     log.parent, os.environ, log)
while "up" not in log.read_text():
    time.sleep(0.02)
print("ready", flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_killed_test_run(tmp_path):
    """Pinned: the kernel ends a server whose test run was killed and could clean up nothing."""
    from rig.server import poll

    tests = Path(__file__).resolve().parents[1]
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        try:
            assert parent.stdout.readline() == "ready\n"
            (child,) = psutil.Process(parent.pid).children()
        finally:
            parent.send_signal(signal.SIGKILL)

    def gone():
        with contextlib.suppress(psutil.NoSuchProcess):
            return child.status() == psutil.STATUS_ZOMBIE
        return True

    poll(gone, 10, "the end of a process whose parent was killed")


def test_a_tree_ends_whole(tmp_path):
    """Pinned: a grandchild that lost its parent and left the group is found and ended too."""
    from rig._process import Tree
    from rig.server import poll

    orphan = "import os, time; os.setpgid(0, 0); print('up', flush=True); time.sleep(600)"
    middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    log = tmp_path / "log"
    tree = Tree([sys.executable, "-c", middle], tmp_path, os.environ, log)
    poll(lambda: "up" in log.read_text() and not tree.running(), 20, "the grandchild's start")
    assert len(tree.members()) == 1
    tree.end(signal.SIGTERM, timeout=0)
    assert tree.members() == []


@pytest.mark.soak
def test_a_failed_start_shows_the_log(checkpoint, tmp_path):
    """Pinned: a server that can't start says why, and leaves no process."""
    from rig.server import Server, ServerError

    server = Server(checkpoint("llama"), workdir=tmp_path, extra_args=["--no-such-flag"])
    with pytest.raises(ServerError, match="no-such-flag"):
        server.start()
    assert server.pids() == []
    assert not server.alive()
