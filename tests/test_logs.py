"""Every line of the log is of its format, whoever writes it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from service.system.logs import JsonFormatter
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


def test_json_logs_are_one_object_a_line() -> None:
    record = logging.LogRecord("reprise", logging.WARNING, "", 0, "two\nlines %s", ("x",), None)
    record.tokens = 3
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["message"], entry["level"], entry["tokens"]) == ("two\nlines x", "warning", 3)
