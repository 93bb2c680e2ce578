"""Every line of the log is of its format, whoever writes it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.processes import ROOT

ENGINE = """
import logging
from service.system.logs import configure_logging
configure_logging("info", "json", engine=1)
logging.getLogger("reprise.engine").info("ready")
"""
PROGRAM = """
import logging, warnings
from service.system.logs import configure_logging
configure_logging("info", "json")
logging.getLogger("reprise").info("of ours", extra={"request_id": "r"})
warnings.warn("of a library")
"""


def test_warnings_of_libraries_are_entries_of_a_json_log() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    ours, warning = map(json.loads, done.stderr.splitlines())
    assert ours["message"] == "of ours" and ours["request_id"] == "r"
    assert "of a library" in warning["message"] and warning["level"] == "warning"


def test_lines_of_several_engines_are_told_apart() -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE], cwd=ROOT, capture_output=True, text=True, check=True)
    line = json.loads(done.stderr)
    assert (line["message"], line["engine"]) == ("ready", 1)
