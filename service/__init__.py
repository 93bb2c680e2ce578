"""The server. It imports `models` from beside itself: another package of that name is refused by name."""

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
