"""What installing takes: the source distribution is whole, the wheel is one for every CPython."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(kind, source, target):
    """Run the build front end; the only file it made."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "build", f"--{kind}", "--no-isolation", "-o", target, source],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (made,) = Path(target).iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    # From a copy: building leaves files beside setup.py, and the tree is the developer's.
    import shutil

    copy = tmp_path_factory.mktemp("source") / "cachestore"
    ignore = shutil.ignore_patterns(".venv", ".git", "build", ".hypothesis", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignore)
    return build("sdist", copy, tmp_path_factory.mktemp("sdist"))


def test_the_sdist_has_all_that_building_needs(sdist):
    """Pinned: native sources and headers, the declarations, licence and shipped settings."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {
        path.relative_to(ROOT).as_posix()
        for part in ("native", "cachestore_connector", "configs")
        for path in (ROOT / part).rglob("*")
        if path.suffix in (".h", ".cc", ".py", ".yaml", ".typed") and "__pycache__" not in str(path)
    }
    assert tracked - names == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_sdist_builds_one_abi3_wheel(sdist, tmp_path):
    """Pinned: unpacked elsewhere it builds by itself; one wheel for CPython 3.10 and later."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    wheel = build("wheel", source, tmp_path / "wheel")
    assert "-cp310-abi3-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "cachestore_connector/_native.abi3.so" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "sglang.srt.plugins" in zipfile.ZipFile(wheel).read(entry_points).decode()
