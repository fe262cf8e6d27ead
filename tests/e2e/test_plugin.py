"""What the plugin adds to SGLang, seen from outside."""

import os
import subprocess
import sys

import pytest

PROMPT = 690
STORED = 640
PAGES = 10


def test_offered_on_the_command_line(tmp_path):
    """Pinned: installing is enough for ``--help`` to list the backend among SGLang's own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "sglang.launch_server", "--help"],
        cwd=tmp_path,
        env=env | {"CACHESTORE_RIG": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    option = shown.stdout.split("--hicache-storage-backend {", 1)[1].split("}", 1)[0]
    assert "cachestore" in option.split(",")
    assert "file" in option.split(",")


def test_sglangs_metrics_move(llama_server, attached, storage, prompt, computed, restored):
    """Pinned: SGLang's metrics page counts our pages, each once, and times them."""
    from rig.server import poll

    ids = prompt(PROMPT, seed=40)
    with attached(llama_server, "cachestore", storage.config()) as server:
        first = server.metrics()

        def moved(name):
            return server.metrics().get(name, 0) - first.get(name, 0)

        cold = computed(server, ids)
        storage.wait(PAGES)
        poll(lambda: moved("sglang:backuped_tokens_total") == STORED, 20, "backed-up tokens")
        poll(lambda: moved("sglang:backup_pgs_sum") == PAGES, 20, "backed-up pages")
        assert moved("sglang:backup_bandwidth_count") > 0
        assert moved("sglang:prefetch_pgs_sum") == 0

        restored(server, ids, STORED, cold)
        poll(lambda: moved("sglang:prefetched_tokens_total") == STORED, 20, "prefetched tokens")
        poll(lambda: moved("sglang:prefetch_pgs_sum") == PAGES, 20, "prefetched pages")
        assert moved("sglang:prefetch_bandwidth_count") > 0
        assert moved("sglang:backup_pgs_sum") <= 2 * PAGES  # the restored prefix, at most once


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_injected_failures_and_delays(name, serve, storage, prompt):
    """Pinned: under SGLang's own fault injector every answer is that of a computed one."""
    server = serve(
        name,
        storage="cachestore",
        extra_config=storage.config(),
        env={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        },
    )
    prompts = [prompt(PROMPT, seed=41 + i) for i in range(4)]
    expected = [server.generate(ids) for ids in prompts]
    hits = 0
    for _ in range(6):
        for ids, cold in zip(prompts, expected, strict=True):
            server.flush()
            answer = server.generate(ids)
            assert answer.same_output(cold)
            hits += answer.storage
    assert 0 < hits < 24 * STORED
    assert "injector enabled" in server.log_text()
