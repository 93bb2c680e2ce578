"""Drops privileges of a confined worker before it reads untrusted data. No step needs privileges itself."""

from __future__ import annotations

import ctypes
import resource

from service.children import leave_signals_to_parent

MAX_FILES = 64

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


def confine(memory_bytes: int) -> None:
    """Limits memory and files, and drops privileges and network access.

    The network is removed only where users may create namespaces, which many containers do not allow.
    """
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}")
    # Root can create a network namespace alone; other users need a user namespace with it.
    if libc.unshare(_CLONE_NEWNET) != 0:
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def allow_cpu(seconds: int) -> None:
    """Allows this job so many more seconds of processor time; SIGXCPU then ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
