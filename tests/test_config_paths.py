"""config.py, the paths of storage_backends: what expands, what is refused, the default (F32)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cachestore_connector.config import load
from cachestore_connector.errors import ConfigError

ENV = {"HOME": "/home/u"}


def refused(extra: Any, *parts: str, environ: dict[str, str] = ENV) -> ConfigError:
    """The error of load(extra), after checking that each of parts is in its message."""
    with pytest.raises(ConfigError) as caught:
        load(extra, environ)
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def backends(value: Any, **environ: str) -> tuple[str, ...]:
    return load({"storage_backends": value}, ENV | environ).storage_backends


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ("/a", ("/a",)),
        ("/a:/b", ("/a", "/b")),
        (["/a", "/b"], ("/a", "/b")),
        (("/a",), ("/a",)),
        (["/a:b"], ("/a:b",)),
        (["/with space/and  two "], ("/with space/and  two ",)),
        ("/with space:/кэш", ("/with space", "/кэш")),
        (["/a/", "//b//c/./d//"], ("/a", "/b/c/d")),
        ("~", ("/home/u",)),
        ("~/x:~/y", ("/home/u/x", "/home/u/y")),
        (["/a/~"], ("/a/~",)),
        ("$D/x", ("/data/x",)),
        ("${D}x", ("/datax",)),
        (["${D}/$E"], ("/data/e e",)),
        ("$T/x", ("/home/u/t/x",)),
        (["/a/$$D"], ("/a/$D",)),
        (["/a$/b"], ("/a$/b",)),
        (["$C"], ("/p:/q",)),
        ("/", ("/",)),
    ],
    ids=str,
)
def test_paths_that_work(value: Any, paths: tuple[str, ...]) -> None:
    """Lists, colons, ~, variables, blanks, unicode and slashes come out as they should."""
    assert backends(value, D="/data", E="e e", T="~/t", C="/p:/q") == paths


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("", "entry 0, '': it is empty"),
        ("/a::/b", "entry 1, '': it is empty"),
        ("/a:", "entry 1, '': it is empty"),
        ([], "at least one"),
        (["/a", ""], "entry 1"),
        (["/a", None], "entry 1, None: a path must be a string"),
        (["/a", 5], "entry 1"),
        (["/a", {"/b": "/c"}], "entry 1"),
        (5, "list of absolute paths"),
        (True, "list of absolute paths"),
        ({"a": "/b"}, "list of absolute paths"),
        ("a/b", "not an absolute path"),
        ("./a", "not an absolute path"),
        ("/a: /b", "entry 1, ' /b': it is not an absolute path"),
        (["/a", "/a"], "entry 1 is '/a' again"),
        ("/a:/a/", "entry 1 is '/a' again"),
        ("~:/home/u/.", "entry 1 is '/home/u' again"),
        ("$NOPE/x", "NOPE is not defined"),
        ("${NOPE}/x", "NOPE is not defined"),
        ("$EMPTY/x", "EMPTY is empty"),
        ("${}/x", "not the name of a variable"),
        (["${A:-/x}"], "not the name of a variable"),
        ("${A:-/x}", "no }"),
        ("~no-such-user-here/x", "~no-such-user-here has no home directory"),
        ("$C", "write the paths as a list"),
        (["/a\n"], "control character"),
        (["/a\0"], "control character"),
        (["/a\ud800"], "file name"),
    ],
    ids=str,
)
def test_paths_that_are_refused(value: Any, part: str) -> None:
    """Each is refused with the entry, its place and the reason; nothing is quietly dropped."""
    environ = ENV | {"EMPTY": "", "C": "/p:/q"}
    refused(
        {"storage_backends": value}, "storage_backends", part, "absolute paths", environ=environ
    )


def test_dot_dot_is_resolved_through_links(tmp_path: Path) -> None:
    """`link/..` is the parent of where the link leads, not the directory the link is in."""
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    real = os.path.realpath(tmp_path)
    assert backends([f"{tmp_path}/link/../store"]) == (f"{real}/far/store",)


def test_home_comes_from_the_user_database_without_HOME() -> None:
    """A service has no HOME; ~ and the default are still the user's own directory."""
    import pwd

    home = pwd.getpwuid(os.getuid()).pw_dir
    for environ in ({}, {"HOME": ""}):
        assert load({"storage_backends": "~/x"}, environ).storage_backends == (f"{home}/x",)
        assert load(None, environ).storage_backends == (f"{home}/.cache/cachestore",)
    refused({"storage_backends": "~/x"}, "not absolute", environ={"HOME": "rel"})
    refused(None, "storage_backends", "not absolute", environ={"HOME": "rel"})


@pytest.mark.parametrize(
    ("xdg", "path"),
    [
        ("/xdg", "/xdg/cachestore"),
        ("/xdg dir/", "/xdg dir/cachestore"),
        ("/x:y", "/x:y/cachestore"),
        ("/x$HOME", "/x$HOME/cachestore"),
        ("", "/home/u/.cache/cachestore"),
        ("rel/dir", "/home/u/.cache/cachestore"),
        ("~/c", "/home/u/.cache/cachestore"),
    ],
)
def test_default_directory_follows_xdg(xdg: str, path: str) -> None:
    """XDG_CACHE_HOME is taken literally if absolute, and ignored if empty or relative."""
    assert load(None, ENV | {"XDG_CACHE_HOME": xdg}).storage_backends == (path,)


def test_no_default_is_computed_when_none_is_needed() -> None:
    """A broken HOME is no reason to refuse a config that names its directories."""
    environ = {"HOME": "rel"}
    assert load({"storage_backends": "/a"}, environ).storage_backends == ("/a",)


component = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/:$"), min_size=1, max_size=8
).filter(lambda text: text not in (".", ".."))
path_lists = st.lists(
    st.lists(component, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts)),
    min_size=1,
    max_size=4,
    unique=True,
)


@given(path_lists)
def test_path_lists_round_trip(paths: list[str]) -> None:
    """A list, the same joined by colons, and both through JSON and YAML, are the same paths."""
    wanted = tuple(paths)
    assert backends(paths) == wanted
    assert backends(":".join(paths)) == wanted
    assert backends([path + "/" for path in paths]) == wanted
    for text in (json.dumps(paths), json.dumps(":".join(paths))):
        assert backends(json.loads(text)) == wanted
    for given_value in (paths, ":".join(paths)):
        assert backends(yaml.safe_load(yaml.safe_dump(given_value))) == wanted


@given(st.lists(st.one_of(st.text(max_size=6), st.none(), st.integers()), max_size=4))
def test_any_list_gives_absolute_paths_or_a_config_error(entries: list[Any]) -> None:
    """Whatever is in the list, the outcome is a tuple of as many absolute paths, or our error."""
    try:
        paths = backends(entries)
    except ConfigError as error:
        assert "storage_backends" in str(error)
    else:
        assert len(paths) == len(entries) == len(set(paths))
        assert all(os.path.isabs(path) for path in paths)
