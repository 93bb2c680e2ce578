"""Logging of both processes: text, or one JSON object per line. Prompts are never logged."""

from __future__ import annotations

import json
import logging
import time

RESERVED = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({key: value for key, value in record.__dict__.items() if key not in RESERVED})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        extra = {key: value for key, value in record.__dict__.items() if key not in RESERVED}
        suffix = "".join(f" {key}={value}" for key, value in extra.items())
        return super().format(record) + suffix


def configure_logging(level: str, log_format: str, **fields: object) -> None:
    """Logs to stderr. log_format: "text" or "json". fields: what every line has beside its own."""
    handler = logging.StreamHandler()

    def add_fields(record: logging.LogRecord) -> bool:
        vars(record).update(fields)
        return True

    handler.addFilter(add_fields)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # or the libraries' warnings would be lines of another form
    for noisy in ("httpx", "httpcore", "httpx2", "httpcore2", "PIL", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
