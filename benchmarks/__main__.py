"""``python -m benchmarks``."""

import pathlib
import sys

# What is measured is the installed package, with its compiled extension. `python -m` has put the
# repository's root, where `cachestore_connector` is a source tree without one, first in the path:
# move it to the end. The modules of `benchmarks` are found all the same.
_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() != _ROOT]
sys.path.append(str(_ROOT))

from benchmarks.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
