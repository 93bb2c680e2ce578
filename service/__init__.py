"""The server."""

import os
from contextlib import suppress

# OpenBLAS reads this when NumPy is loaded. Its threads, one for each processor, would spin for 0.1 s after a product,
# such as those of resampling. The engine's torch has its own.
if "OPENBLAS_NUM_THREADS" not in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with suppress(ImportError):  # which is named later
        import numpy as numpy
    del os.environ["OPENBLAS_NUM_THREADS"]
