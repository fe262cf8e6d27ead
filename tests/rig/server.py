"""One real SGLang server on the CPU, as a context manager.

Every wait is bounded and says what it waited for; nothing outlives the ``with`` block, nor the
process that started it (see ``_process.py``). Traffic goes to 127.0.0.1 only.
"""

import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from . import _process

ADMIN_KEY = "rig-admin"
_LOG_TAIL = 60  # lines shown with an error


class ServerError(RuntimeError):
    """The server didn't start, answer or end as asked; the message has the end of its log."""


@dataclass(frozen=True)
class Generation:
    """One answer. ``device``, ``host`` and ``storage`` count prompt tokens found cached there."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each output token
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]  # per output token: (token, logprob)
    prompt_tokens: int
    device: int
    host: int
    storage: int
    storage_backend: str | None  # class name of the backend, where SGLang says it
    ttft: float  # seconds from sending the request to the first token received
    meta: Mapping[str, Any] = field(repr=False, compare=False)

    def same_output(self, other: "Generation", digits: int = 4) -> bool:
        """Same tokens, same runners-up, and log-probabilities equal to ``digits`` decimals."""
        tolerance = 0.5 * 10**-digits
        ours, theirs = self._flat(), other._flat()
        return (
            self.tokens == other.tokens
            and len(ours) == len(theirs)
            and all(abs(a - b) <= tolerance for a, b in zip(ours, theirs, strict=True))
        )

    def _flat(self) -> list[float]:
        best = [logprob for position in self.top_logprobs for _, logprob in position]
        return [*self.logprobs, *best]


def poll(condition: Callable[[], Any], timeout: float, what: str, interval: float = 0.05) -> Any:
    """Ask ``condition`` until it answers something true and return that, or raise TimeoutError.

    For what another process does and can't signal: it is the only sleep of the rig.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(interval)


class Server:
    """``python -m sglang.launch_server`` with HiCache on the CPU.

    ``storage`` is a backend name or None. ``extra_config`` goes to
    ``--hicache-storage-backend-extra-config``: a dict (sent as JSON) or a string such as
    ``@/path/file.yaml``. ``env`` is laid over an environment from which ``SGLANG_*``,
    ``CACHESTORE_*`` and Python's own paths were dropped. ``layout`` is ``page_first_direct`` or
    ``layer_first``. Not thread-safe, except ``generate`` and the other HTTP calls.

    Start it from a thread that lives as long as the server: the kernel ends the server with the
    thread that started it.
    """

    def __init__(
        self,
        model: Path,
        *,
        storage: str | None = None,
        extra_config: Mapping[str, Any] | str | None = None,
        workdir: Path | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        tp: int = 1,
        page_size: int = 64,
        dtype: str = "float32",
        layout: str = "page_first_direct",
        served_model_name: str | None = None,
        write_policy: str = "write_through",
        prefetch_policy: str = "wait_complete",
        max_total_tokens: int = 8192,
        hicache_ratio: float = 2,
        hicache: bool = True,
        metrics: bool = True,
        ready_timeout: float = 240,
    ):
        self._owned = None if workdir else tempfile.TemporaryDirectory(prefix="cachestore-rig-")
        self.workdir = Path(workdir or self._owned.name)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.ready_timeout = ready_timeout
        self.ready_seconds: float | None = None
        self._process: _process.Tree | None = None
        self._threads = threading.local()

        args = {
            "--model-path": model,
            "--host": "127.0.0.1",
            "--device": "cpu",
            "--dtype": dtype,
            "--tp": tp,
            "--page-size": page_size,
            "--mem-fraction-static": 0.1,
            "--max-total-tokens": max_total_tokens,
            "--hicache-ratio": hicache_ratio,
            "--hicache-mem-layout": layout,
            "--hicache-io-backend": "direct",
            "--hicache-write-policy": write_policy,
            "--hicache-storage-prefetch-policy": prefetch_policy,
            "--admin-api-key": ADMIN_KEY,
        }
        if storage is not None:
            args["--hicache-storage-backend"] = storage
        if extra_config is not None:
            args["--hicache-storage-backend-extra-config"] = _config_text(extra_config)
        if served_model_name is not None:
            args["--served-model-name"] = served_model_name
        flags = ["--skip-tokenizer-init", "--enable-cache-report"]
        if hicache:
            flags.append("--enable-hierarchical-cache")
        flags.append("--sleep-on-idle")  # for 5 ms only, by the rig's plugin
        if tp > 1:
            flags.append("--disable-custom-all-reduce")
        if metrics:
            flags.append("--enable-metrics")
        self._args = [str(word) for pair in args.items() for word in pair] + flags
        self._args += [str(word) for word in extra_args]
        self._env = _environment(tp) | dict(env or {})
        self.log_path = self.workdir / "server.log"
        self.port = 0

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, *exc_info) -> None:
        try:
            self.stop()
        finally:
            self._discard()

    def start(self) -> None:
        """Start and wait until it serves. Raises ServerError with the end of the log."""
        if self._process is not None:
            raise ServerError("already started")
        # SGLang adds its current directory to sys.path: an empty one hides no installed package.
        cwd = self.workdir / "cwd"
        cwd.mkdir(exist_ok=True)
        self.port = _free_port()
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port)]
        began = time.monotonic()
        self._process = _process.Tree(command + self._args, cwd, self._env, self.log_path)
        try:
            poll(self._ready, self.ready_timeout, "the server being ready", interval=0.2)
        except (TimeoutError, ServerError) as error:
            self.kill()
            raise ServerError(f"{error}\n{self._tail()}") from None
        except BaseException:
            self.kill()
            raise
        self.ready_seconds = time.monotonic() - began

    def stop(self, timeout: float = 20) -> None:
        """SIGTERM as an operator would; after ``timeout`` seconds, or for leftovers, SIGKILL."""
        if self._process is not None:
            self._process.end(signal.SIGTERM, timeout)
            self._process = None

    def kill(self) -> None:
        """SIGKILL to every process of the server at once: nobody gets to say goodbye."""
        if self._process is not None:
            self._process.end(signal.SIGKILL, 10)
            self._process = None

    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self._process is not None and self._process.running()

    def pids(self) -> list[int]:
        """Process ids of the schedulers, in rank order: the processes that hold the backend."""
        if self._process is None:
            return []
        named = []
        for process in self._process.members():
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if "sglang::scheduler" in title:
                    named.append((title, process.pid))
        return [pid for _, pid in sorted(named)]

    def log_text(self) -> str:
        """Everything the server has printed so far (all runs of this object)."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # -- requests --------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int = 8,
        *,
        logprob: bool = True,
        timeout: float = 60,
        **body: Any,
    ) -> Generation:
        """Ask greedily, streamed so that the first token can be timed; ``body`` adds fields."""
        request = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
            "return_logprob": logprob,
            "top_logprobs_num": 3 if logprob else 0,
        } | body
        began = time.monotonic()
        ttft, last = None, None
        with self._call("POST", "/generate", json=request, stream=True, timeout=timeout) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                last = json.loads(line[len(b"data:") :])
                if "error" in last:
                    raise ServerError(f"generate: {last['error']}\n{self._tail()}")
                ttft = ttft or time.monotonic() - began
        if last is None:
            raise ServerError(f"generate: the stream ended without an answer\n{self._tail()}")
        return _generation(last, ttft)

    def flush(self, timeout: float = 30) -> None:
        """Empty L1 and L2 (the storage keeps what it has)."""
        self._call("POST", "/flush_cache", params={"timeout": timeout}, timeout=timeout + 10)

    def attach(
        self, storage: str, extra_config: Mapping[str, Any] | str | None = None, **fields: Any
    ) -> str:
        """Attach a storage backend to the running server; returns SGLang's message."""
        body = {"hicache_storage_backend": storage} | fields
        if extra_config is not None:
            body["hicache_storage_backend_extra_config_json"] = _config_text(extra_config)
        return self._call("PUT", "/hicache/storage-backend", json=body).text

    def update_weights(self, model: Path, **fields: Any) -> str:
        """Replace the weights in place by another checkpoint's; returns SGLang's message."""
        body = {"model_path": str(model)} | fields
        return self._call("POST", "/update_weights_from_disk", json=body).text

    def detach(self) -> str:
        """Detach the storage backend; returns SGLang's message."""
        return self._call("DELETE", "/hicache/storage-backend").text

    def show(self) -> dict[str, Any]:
        """What SGLang says is attached."""
        return self._call("GET", "/hicache/storage-backend").json()

    def clear(self) -> str:
        """Ask the storage backend to drop what it stored; returns SGLang's message."""
        return self._call("POST", "/hicache/storage-backend/clear").text

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Prometheus samples (name, labels, value); needs ``metrics=True``."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self._call("GET", "/metrics").text
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def metrics(self) -> dict[str, float]:
        """Prometheus samples, summed over labels, by name; needs ``metrics=True``."""
        totals: dict[str, float] = {}
        for name, _, value in self.samples():
            totals[name] = totals.get(name, 0.0) + value
        return totals

    # -- inside ----------------------------------------------------------------------------------

    def _http(self) -> requests.Session:
        """One for each thread: a session isn't safe to share."""
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
            self._threads.session.trust_env = False  # no proxy before the loopback
        return self._threads.session

    def _call(self, method: str, path: str, *, timeout: float = 60, **kwargs) -> requests.Response:
        try:
            answer = self._http().request(
                method,
                f"http://127.0.0.1:{self.port}{path}",
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
                timeout=timeout,
                **kwargs,
            )
        except requests.RequestException as error:
            raise ServerError(f"{method} {path}: {error}\n{self._tail()}") from error
        if answer.status_code != 200:
            raise ServerError(f"{method} {path}: HTTP {answer.status_code}: {answer.text.strip()}")
        return answer

    def _ready(self) -> bool:
        if not self._process.running():
            raise ServerError(f"the server ended with {self._process.returncode()} at start-up")
        try:
            answer = self._http().get(f"http://127.0.0.1:{self.port}/health", timeout=5)
        except requests.RequestException:
            return False
        return answer.status_code == 200

    def _tail(self) -> str:
        lines = self.log_text().splitlines()[-_LOG_TAIL:]
        return "\n".join([f"--- end of {self.log_path}", *lines, "---"])

    def _discard(self) -> None:
        self.kill()
        if self._owned is not None:
            self._owned.cleanup()


def _generation(answer: Mapping[str, Any], ttft: float) -> Generation:
    meta = answer["meta_info"]
    cached = meta.get("cached_tokens_details") or {}
    top = meta.get("output_top_logprobs") or []
    return Generation(
        tokens=tuple(answer["output_ids"]),
        logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or []),
        top_logprobs=tuple(tuple((e[1], e[0]) for e in position or ()) for position in top),
        prompt_tokens=meta["prompt_tokens"],
        device=cached.get("device", 0),
        host=cached.get("host", 0),
        storage=cached.get("storage", 0),
        storage_backend=cached.get("storage_backend"),
        ttft=ttft,
        meta=meta,
    )


def _config_text(config: Mapping[str, Any] | str) -> str:
    return config if isinstance(config, str) else json.dumps(config)


def _free_port() -> int:
    # Not one that the system gives to whoever asks for any: SGLang's processes do until the
    # server binds its own, half a minute later.
    for port in random.sample(range(15000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("no free port from 15000 to 30000")


def _environment(tp: int) -> dict[str, str]:
    """The caller's environment less what would steer SGLang, Python's paths or the store."""
    dropped = ("SGLANG_", "CACHESTORE_", "PYTHON", "PROMETHEUS_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {
        "CACHESTORE_RIG": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # tiny tensors; two servers on two cores don't fight
        "PYTHONUNBUFFERED": "1",
    }
    if tp > 1:
        # SGLang binds each rank to cores and insists on being told which.
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tp)
        )
    return env
