"""How much memory this machine has, for what is refused before it would fill it. Light: standard library."""

from __future__ import annotations

import os


def memory_bytes() -> int | None:
    """Return the bytes of memory of this machine; None where it does not say."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    return found if found > 0 else None
