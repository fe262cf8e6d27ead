"""The native extension; everything else is in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=["cachestore_connector/_ffi_build.py:ffibuilder"],
    # The extension uses CPython's limited API only: one wheel for 3.10 and later.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
