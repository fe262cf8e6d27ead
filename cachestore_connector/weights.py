"""How often this process's model weights were replaced in place.

SGLang can update weights on a live server. It empties its own caches then, and tells a storage
backend nothing; pages stored before would be taken for the new weights'. The plugin counts here,
and the backend looks.
"""

from __future__ import annotations

updates = 0


def count_update() -> None:
    """Weights have been replaced. Called on the scheduler thread alone."""
    global updates
    updates += 1
