"""A replica must not outlive the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def bind_to_parent(parent_pid: int) -> int | None:
    """Asks the kernel to kill this process with its parent. Returns a descriptor readable once the parent is gone.

    Exits at once if the parent is gone already. None where the kernel offers no such descriptor: then compare
    `os.getppid` from time to time.
    """
    if sys.platform == "linux":
        import ctypes

        # SIGKILL, so that it works also while the interpreter is stuck in native code.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_gone(parent_pid):
        raise SystemExit(f"error: the parent process {parent_pid} is gone")
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(parent_pid)
        except OSError:
            return None
    return None


def parent_gone(parent_pid: int) -> bool:
    return os.getppid() != parent_pid
