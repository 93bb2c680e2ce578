"""Drops privileges of a confined worker before it reads untrusted data. No step needs privileges itself."""

from __future__ import annotations

import ctypes
import resource

from service.system.children import leave_signals_to_parent

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
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, MAX_FILES),
    ):
        limit = _attainable(kind, most)
        resource.setrlimit(kind, (limit, limit))
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
    limit = _attainable(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _attainable(kind: int, most: int) -> int:
    """`most`, or the hard limit that the server was started with, if that is less: only root could raise it."""
    _, hard = resource.getrlimit(kind)
    return most if hard == resource.RLIM_INFINITY else min(most, hard)
