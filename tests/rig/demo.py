"""The main job, seen: one prompt, asked before and after a restart of the real SGLang server.

The second server starts with an empty L1 and L2, so what it finds cached came from storage. First
with an MHA model, whose pages go straight between host memory and files; then with an MLA model,
which gets a shared buffer before them. Run by ``make demo``; ``--backend file`` does the same with
SGLang's own file backend, for comparison.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .checkpoints import VOCABULARY, checkpoint
from .server import Generation, Server, poll

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = 64
PROMPT = 700
WHOLE_PAGES = PROMPT // PAGE * PAGE

# The kind of each model.
MODELS = {"llama": "mha", "deepseek": "mla"}

# Of free memory the buffer would take half, for ten pages.
_SMALL_BUFFER = "cache_buffer_capacity_gb: 0.0625\n"

_began = time.monotonic()


def main() -> int:
    """Run the demo; 0 if with every model the tokens came from storage and are identical."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cachestore", choices=["cachestore", "file"])
    parser.add_argument("--model", choices=MODELS, help="one of them alone")
    parser.add_argument("--config", default=REPOSITORY / "configs" / "cachestore.yaml", type=Path)
    options = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGHUP):  # clean up as after Ctrl-C
        signal.signal(ending, signal.default_int_handler)
    models = [options.model] if options.model else list(MODELS)
    for model in models:
        problem = show(model, options)
        if problem:
            return failed(f"{problem} model={MODELS[model]}")
    outcome = f"storage_tokens={WHOLE_PAGES} identical=yes"
    print(f"DEMO OK {outcome} models={','.join(MODELS[model] for model in models)}")
    return 0


def show(model: str, options: argparse.Namespace) -> str | None:
    """Run one model's demo and print its table; what went wrong, or None."""
    try:
        with tempfile.TemporaryDirectory(prefix="cachestore-demo-") as scratch:
            cold, restored = run(model, options, Path(scratch))
    except KeyboardInterrupt:
        return "interrupted"
    except Exception as error:
        print(error, file=sys.stderr)
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"

    identical = restored.same_output(cold)
    print()
    table(cold, restored, identical)
    print()
    if restored.storage == WHOLE_PAGES and identical:
        return None
    return f"storage_tokens={restored.storage} identical={'yes' if identical else 'no'}"


def run(name: str, options: argparse.Namespace, scratch: Path) -> tuple[Generation, Generation]:
    """Ask, stop, start, ask again; everything on disk lies below ``scratch``."""
    model = checkpoint(name, REPOSITORY / "build" / "checkpoints")
    storage = scratch / "storage"
    storage.mkdir()
    draw = random.Random(0)
    prompt = [draw.randrange(2, VOCABULARY) for _ in range(PROMPT)]
    server = Server(
        model,
        storage=options.backend,
        served_model_name=f"tiny-{name}",
        workdir=scratch / "server",
        **settings(options, storage, scratch),
    )

    kind = MODELS[name].upper()
    say(f"model {name} ({kind}; tiny, seeded), backend {options.backend}, storage {storage}")
    say("starting SGLang, about half a minute ...")
    with server:
        if options.backend == "cachestore":
            say(f"pipeline {pipeline(server)}")
        say(f"ready after {server.ready_seconds:.0f} s; asking a prompt of {PROMPT} tokens")
        cold = server.generate(prompt)
        pages = WHOLE_PAGES // PAGE
        say(f"answered; waiting until {pages} pages are stored ...")

        def stored():
            backed_up = server.metrics().get("sglang:backuped_tokens_total", 0) >= WHOLE_PAGES
            # A page can be backed up in memory, and not yet in its file.
            return backed_up and (options.backend != "cachestore" or blocks() >= pages)

        def blocks():
            return len(list(storage.rglob("blocks/*/*")))

        poll(stored, 60, f"{WHOLE_PAGES} tokens stored")
        files = [path for path in storage.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        say(f"stored: {len(files)} files, {size / 1e6:.1f} MB; stopping SGLang ...")
    say("stopped: L1 and L2 are gone; starting SGLang again ...")
    with server:
        say(f"ready after {server.ready_seconds:.0f} s; asking the same prompt")
        restored = server.generate(prompt)
        say("answered; stopping SGLang ...")
    return cold, restored


def settings(options: argparse.Namespace, storage: Path, scratch: Path) -> dict[str, Any]:
    """The arguments by which a server stores in ``storage``."""
    if options.backend == "file":
        return {"env": {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}}
    # The shipped configuration as it is; it stores in $XDG_CACHE_HOME/cachestore. What it leaves
    # open, the file that CACHESTORE_CONFIG names may say.
    small = scratch / "small.yaml"
    small.write_text(_SMALL_BUFFER)
    return {
        "extra_config": f"@{options.config.resolve()}",
        "env": {"XDG_CACHE_HOME": str(storage), "CACHESTORE_CONFIG": str(small)},
    }


def pipeline(server: Server) -> str:
    """The pipeline that was chosen, as the log has it."""
    return server.log_text().partition("CacheStore: pipeline ")[2].partition(" (")[0]


def table(cold: Generation, restored: Generation, identical: bool) -> None:
    """Where the prompt's tokens were found cached, and how soon the first new one came."""
    row = "{:<15}{:>8}{:>8}{:>9}{:>14}   {}"
    print(row.format("", "device", "host", "storage", "first token", "tokens, log-probabilities"))
    for name, answer, verdict in (
        ("cold", cold, "(computed)"),
        ("after restart", restored, "identical" if identical else "DIFFERENT"),
    ):
        ttft = f"{answer.ttft * 1000:.0f} ms"
        print(row.format(name, answer.device, answer.host, answer.storage, ttft, verdict))


def say(text: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f"[demo {time.monotonic() - _began:4.0f} s] {text}", flush=True)


def failed(reason: str) -> int:
    """Print the last line of a demo that didn't work out."""
    print(f"DEMO FAILED {reason}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
