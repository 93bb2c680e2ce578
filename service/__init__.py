"""The server. It imports `models` from beside itself: another package of that name is refused by name."""

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_models = find_spec("models")
_OURS = Path(__file__).resolve().parents[1] / "models" / "__init__.py"
if _models is None or _models.origin is None or Path(_models.origin).resolve() != _OURS:
    _found = "nothing" if _models is None else _models.origin or "a folder without __init__.py"
    raise ImportError(
        f"'models' is {_found}, not Reprise's {_OURS}: start it with the `reprise` command, or from another directory "
        "and without that PYTHONPATH"
    )

# OpenBLAS reads this when NumPy is loaded. Its threads, one for each processor, would spin for 0.1 s after a product,
# such as those of resampling. The engine's torch has its own.
if "OPENBLAS_NUM_THREADS" not in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with suppress(ImportError):  # which is named later
        import numpy as numpy
    del os.environ["OPENBLAS_NUM_THREADS"]
