"""What the demo says at its end; that it works is what ``make demo`` shows."""

import dataclasses
import sys

import pytest

from rig import demo
from rig.server import Generation

GOOD = Generation((1, 2), (-0.1, -0.2), (), 700, 0, 0, 640, "CacheStore", 0.1, {})


@pytest.fixture
def last_line(monkeypatch, capsys):
    """``last_line(answers, *arguments)``: exit status and last line, given answers by model."""

    def call(answers, *arguments):
        def run(model, options, scratch):
            answer = answers[model]
            if isinstance(answer, BaseException):
                raise answer
            return GOOD, answer

        monkeypatch.setattr(demo, "run", run)
        monkeypatch.setattr(sys, "argv", ["demo", *arguments])
        monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
        status = demo.main()
        return status, capsys.readouterr().out.splitlines()[-1]

    return call


def test_both_models(last_line):
    """Pinned: the line that says that all is well, word for word."""
    done = last_line({"llama": GOOD, "deepseek": GOOD})
    assert done == (0, "DEMO OK storage_tokens=640 identical=yes models=mha,mla")


def test_one_model_alone(last_line):
    """Pinned: what was asked for is what is shown."""
    done = last_line({"deepseek": GOOD}, "--model", "deepseek")
    assert done == (0, "DEMO OK storage_tokens=640 identical=yes models=mla")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (dataclasses.replace(GOOD, storage=576), "storage_tokens=576 identical=yes"),
        (dataclasses.replace(GOOD, tokens=(1, 3)), "storage_tokens=640 identical=no"),
        (TimeoutError("640 tokens stored: not within 60 s\nmore"),
         "TimeoutError: 640 tokens stored: not within 60 s"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)  # fmt: skip
def test_a_failure_of_either_is_one(last_line, answer, reason):
    """Pinned: the first model that fails ends it, by its kind."""
    failed = last_line({"llama": GOOD, "deepseek": answer})
    assert failed == (1, f"DEMO FAILED {reason} model=mla")
    assert last_line({"llama": answer})[1] == f"DEMO FAILED {reason} model=mha"
