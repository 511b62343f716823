"""Keep this process on some cores: one kind of core of a phone's, or one that other work leaves alone. Light."""

from __future__ import annotations

import os

from ..errors import SnapvitError, UsageError


def pin_to(cores: str | None) -> None:
    """Run only on these cores from now on, `0` or `0,2`; None: leave it as it is."""
    if cores is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise SnapvitError("this system cannot keep a process on chosen cores. Leave --pin out")
    try:
        wanted = {int(part) for part in cores.split(",")}
    except ValueError:
        raise UsageError(f"--pin '{cores}' is not a list of cores. Write it like 0 or 0,2") from None
    allowed = os.sched_getaffinity(0)
    if not wanted <= allowed:
        known = ", ".join(map(str, sorted(allowed)))
        raise UsageError(f"--pin {cores}: this process may use the cores {known}. Choose among them")
    os.sched_setaffinity(0, wanted)
