"""What forked processes may not do with the objects of their parent."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeing_nothing_of_the_parent() -> Iterator[None]:
    """Processes that are forked inside never collect what this process had made before.

    A process group in a cycle, freed in a forked process, waits for threads that are not there.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
