"""The values that options choose from, by the names that users write."""

from __future__ import annotations

import dataclasses
import enum


class CacheMode(enum.Enum):
    """`lookup.cache`: what a host keeps of a table (FLIP-221)."""

    NONE = "NONE"
    PARTIAL = "PARTIAL"
    FULL = "FULL"


class MetadataSource(enum.Enum):
    """`lookup.metadata.source`: who answers get_meta (Alluxio's feature switch)."""

    UFS = "UFS"
    CACHE = "CACHE"


class VersionAt(enum.Enum):
    """`lookup.version-at`: when a scan's version is resolved."""

    AUTO = "AUTO"
    PLAN = "PLAN"
    READ = "READ"


class OnVersionGone(enum.Enum):
    """`lookup.on-version-gone`: what a larger scan does when its version vanished."""

    NEWER = "NEWER"
    FAIL = "FAIL"


class OnBusy(enum.Enum):
    """`lookup.on-busy`: what is read while a job writes the table's files."""

    KEEP = "KEEP"
    FAIL = "FAIL"


class FilterPushdown(enum.Enum):
    """`lookup.filter-pushdown`: whether Spark's pushed filters prune."""

    AUTO = "AUTO"
    TRUE = "true"
    FALSE = "false"


class ReloadStrategy(enum.Enum):
    """`lookup.full-cache.reload-strategy`: which of FLIP-221's triggers reloads."""

    PERIODIC = "PERIODIC"
    TIMED = "TIMED"


class OnReloadFailure(enum.Enum):
    """`lookup.full-cache.on-reload-failure`: whether the last snapshot goes on serving."""

    KEEP = "KEEP"
    FAIL = "FAIL"


class RetryPredicate(enum.Enum):
    """`lookup.retry.predicate`: what is looked up again (FLIP-234)."""

    LOOKUP_MISS = "lookup_miss"


class OnError(enum.Enum):
    """`lookup.on-error`: what becomes of rows whose lookup failed."""

    FAIL = "FAIL"
    NULL = "NULL"


class View(enum.Enum):
    """`lookup.view`: what a read returns."""

    DATA = "data"
    FILES = "files"
    VERSIONS = "versions"
    METRICS = "metrics"
    SUMMARY = "summary"
    TOKEN = "token"
    CHANGES = "changes"


class StreamStart(enum.Enum):
    """Where a stream of changes begins: with the table as it is, or with what is committed from now on."""

    SNAPSHOT = "SNAPSHOT"
    LATEST = "LATEST"


class Overlap(enum.Enum):
    """What an as-of lookup does where two rows of a key are valid at once."""

    ERROR = "ERROR"
    NEWEST = "NEWEST"


class KeyedWrite(enum.Enum):
    """How Spark's append mode writes rows by their keys."""

    UPSERT = "upsert"


class MissingColumns(enum.Enum):
    """`lookup.write.missing-columns`: what an upsert does to columns that its rows do not have."""

    KEEP = "KEEP"
    NULL = "NULL"


class FileFormatName(enum.Enum):
    """`lookup.format`: how the files are encoded."""

    PARQUET = "parquet"
    ARROW = "arrow"
    CSV = "csv"
    JSON = "json"
    ORC = "orc"


@dataclasses.dataclass(frozen=True)
class CsvOptions:
    """`lookup.csv.*`: how CSV files are written. `escape` None: a quote inside of quoted text is doubled, as far as anybody can tell."""

    header: bool = True
    sep: str = ","
    quote: str = '"'
    escape: str | None = None
    null_value: str = ""
    encoding: str = "utf-8"
    infer_schema: bool = True
