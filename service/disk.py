"""What the operating system says of a full disk."""

from __future__ import annotations

import errno


def no_space(error: OSError) -> bool:
    """Whether there is no space left: on the device, in the quota, or below the largest file allowed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
