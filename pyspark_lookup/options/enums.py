"""The values of options that have a fixed choice, each with the text that users write. The options' own texts explain them."""

from __future__ import annotations

import enum


class CacheMode(enum.Enum):
    NONE = "NONE"
    PARTIAL = "PARTIAL"
    FULL = "FULL"


class PartialCacheStore(enum.Enum):
    BUILT_IN = "BUILT_IN"
    DISKCACHE = "DISKCACHE"


class MetadataSource(enum.Enum):
    UFS = "UFS"
    CACHE = "CACHE"


class VersionAt(enum.Enum):
    AUTO = "AUTO"
    PLAN = "PLAN"
    READ = "READ"


class OnVersionGone(enum.Enum):
    NEWER = "NEWER"
    FAIL = "FAIL"


class OnBusy(enum.Enum):
    KEEP = "KEEP"
    FAIL = "FAIL"


class ReloadStrategy(enum.Enum):
    PERIODIC = "PERIODIC"
    TIMED = "TIMED"


class OnReloadFailure(enum.Enum):
    KEEP = "KEEP"
    FAIL = "FAIL"


class RetryPredicate(enum.Enum):
    LOOKUP_MISS = "lookup_miss"


class OnError(enum.Enum):
    FAIL = "FAIL"
    NULL = "NULL"
    STALE = "STALE"


class View(enum.Enum):
    DATA = "data"
    FILES = "files"
    VERSIONS = "versions"
    METRICS = "metrics"
    SUMMARY = "summary"
    TOKEN = "token"
    CHANGES = "changes"


class StreamStart(enum.Enum):
    SNAPSHOT = "SNAPSHOT"
    LATEST = "LATEST"


class Overlap(enum.Enum):
    ERROR = "ERROR"
    NARROWEST = "NARROWEST"
    NEWEST = "NEWEST"
    ALL = "ALL"


class Bounds(enum.Enum):
    BOTH = "[]"
    LOWEST = "[)"
    HIGHEST = "(]"
    NEITHER = "()"

    @property
    def closed(self) -> tuple[bool, bool]:
        """(whether a range includes its lowest value, whether it includes its highest value)."""
        return self.value[0] == "[", self.value[1] == "]"


class OnBadNetwork(enum.Enum):
    ERROR = "ERROR"
    SKIP = "SKIP"


class KeyedWrite(enum.Enum):
    UPSERT = "upsert"


class MissingColumns(enum.Enum):
    KEEP = "KEEP"
    NULL = "NULL"


class FileFormatName(enum.Enum):
    PARQUET = "parquet"
    ARROW = "arrow"
    CSV = "csv"
    JSON = "json"
    ORC = "orc"
