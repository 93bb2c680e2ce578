"""Recognises the operating system's errors for a full disk."""

from __future__ import annotations

import errno


def no_space(error: OSError) -> bool:
    """Whether the error means that no space is left: on the device, in the quota, or within the limit of file sizes."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
