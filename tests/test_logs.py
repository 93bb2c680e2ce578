"""Every line of the log is of its format, whoever writes it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.processes import ROOT

PROGRAM = """
import logging, warnings
from service.system.logs import configure_logging
configure_logging("info", "json", engine=1)
logging.getLogger("reprise").info("of ours", extra={"request_id": "r"})
warnings.warn("of a library")
"""


def test_a_json_log_names_the_engine_and_has_the_warnings_of_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    ours, warning = map(json.loads, done.stderr.splitlines())
    assert (ours["message"], ours["request_id"], ours["engine"]) == ("of ours", "r", 1)
    assert "of a library" in warning["message"] and warning["level"] == "warning"
