"""`cachestore doctor`: SGLang, the hooks, and this installation."""

import importlib.metadata

import pytest

from cachestore_connector.async_load.known_code import SGLANG
from cachestore_connector.cli import doctor_sglang


def fits(**changed):
    targets = ("sglang.a.B.c", "sglang.a.B.d")
    return lambda: {"hooks": dict.fromkeys(targets), "loader": []} | changed


def installed(monkeypatch, version):
    real = importlib.metadata.version

    def answer(name):
        if name != "sglang":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)


def levels(found):
    return [each.level.value for each in found]


def test_no_sglang_is_a_warning(monkeypatch):
    """Pinned: the command works without it, and says that hooks weren't looked at."""
    installed(monkeypatch, None)
    (found,) = doctor_sglang.hooks(lambda: pytest.fail("looked at"))
    assert found.level == "WARN" and "not installed" in found.what


def test_another_version(monkeypatch):
    """Pinned: a warning, and each hook by itself."""
    installed(monkeypatch, "0.6.0")
    found = doctor_sglang.hooks(fits())
    assert levels(found) == ["WARN", "OK", "OK", "OK"]
    assert "0.6.0" in found[0].what and SGLANG in found[0].what


def test_hooks_that_do_not_fit(monkeypatch):
    """Pinned: a failure for each, with the way around; the loader's is a warning, unless wanted."""
    installed(monkeypatch, SGLANG)
    hooks = {"sglang.a.B.c": None, "sglang.a.B.d": "sglang.a.B.d takes ['x'], not ['y'] first"}
    found = doctor_sglang.hooks(fits(hooks=hooks, loader=["A.b", "C", "D", "E.f"]))
    assert levels(found) == ["OK", "OK", "FAIL", "WARN"]
    assert "takes ['x']" in found[2].what and "dynamic" in found[2].do
    assert "A.b, C, D and 1 more" in found[3].what
    monkeypatch.setenv("SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE", "1")
    assert levels(doctor_sglang.hooks(fits(loader=["A.b"])))[-1] == "FAIL"


def found_with(monkeypatch, tmp_path, code):
    """What is said of an SGLang that is this code."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    installed(monkeypatch, SGLANG)
    return doctor_sglang.hooks(doctor_sglang._ask)


def test_sglang_that_can_not_be_imported(monkeypatch, tmp_path):
    """Pinned: its last line of error, in a failure; what it prints is no matter."""
    code = "print('noise'); raise ImportError('libcuda.so.1: none')"
    found = found_with(monkeypatch, tmp_path, code)
    assert levels(found) == ["OK", "FAIL"]
    assert "libcuda.so.1: none" in found[1].what


def test_sglang_without_the_functions(monkeypatch, tmp_path):
    """Pinned: an SGLang that has none of them: every hook fails, and the loader is off."""
    found = found_with(monkeypatch, tmp_path, "print('noise without a newline', end='')")
    assert levels(found) == ["OK", *["FAIL"] * 6, "WARN"]
    assert "can't be hooked" in found[1].what


@pytest.mark.timeout(180)
def test_the_installed_sglang_fits():
    """Pinned: with the version that it was made for, every hook fits."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("SGLang isn't installed")
    if version != SGLANG:
        pytest.skip(f"SGLang {version} is installed, not {SGLANG}")
    found = doctor_sglang.checks({})
    assert set(levels(found)) == {"OK"}, found
    assert sum(each.check == "hook" for each in found) == 7


def point(name, value):
    return importlib.metadata.EntryPoint(name, value, "sglang.srt.plugins")


def test_entry_point():
    """Pinned: missing, another's, ours."""
    ours = point("cachestore", "cachestore_connector.plugin:register")
    assert doctor_sglang.entry_point([point("other", "x:y")]).level == "FAIL"
    assert doctor_sglang.entry_point([point("cachestore", "x:y")]).level == "FAIL"
    assert doctor_sglang.entry_point([point("other", "x:y"), ours]).level == "OK"
    assert doctor_sglang.entry_point().level == "OK"  # as installed


def test_plugins_switched_off():
    """Pinned: SGLANG_PLUGINS that doesn't name ours keeps it out."""
    (found,) = doctor_sglang.switched_off({"SGLANG_PLUGINS": "none"})
    assert found.level == "FAIL"
    for given in ({}, {"SGLANG_PLUGINS": ""}, {"SGLANG_PLUGINS": "other, cachestore"}):
        assert doctor_sglang.switched_off(given) == []


def test_native_code(monkeypatch):
    """Pinned: a compiled part that can't be loaded is a failure that says so."""
    import sys

    assert doctor_sglang.native().level == "OK"
    monkeypatch.setitem(sys.modules, "cachestore_connector.store", None)
    monkeypatch.delattr("cachestore_connector.store", raising=False)
    assert doctor_sglang.native().level == "FAIL"
