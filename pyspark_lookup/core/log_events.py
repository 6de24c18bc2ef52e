"""`log_event`: writes one line to the Python log for each event that an operator should know of, in one format for people and programs.

    lookupcache reload table=s3://bucket/dim version=3f… seconds=1.2 rows=10000

For handlers that write JSON, the log record also has the event as `lookup_event` and its fields as `lookup_fields`. If Spark captures the
logs of workers (`spark.sql.pyspark.worker.logging.enabled`), only the line is left.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from pyspark_lookup.core.credentials import printable
from pyspark_lookup.errors import foreign_text


def log_event(log: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log an event with its fields as `key=value`, in logfmt. Texts with spaces, quotes or `=` are quoted as in JSON."""
    if log.isEnabledFor(level):
        fields = {name: foreign_text(value) if isinstance(value, str) else value for name, value in fields.items()}
        text = " ".join(f"{name}={_text(value)}" for name, value in fields.items())
        log.log(level, "lookupcache %s %s", event, text, extra={"lookup_event": event, "lookup_fields": fields})


def _text(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(char in text for char in ' "=\\')
    return text if plain else printable(json.dumps(text, ensure_ascii=False))
