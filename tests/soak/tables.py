"""The two tables of a soak: where they are, what is in them, and how the stream reads them."""

from tests.history.worker import KEYS

__all__ = ["KEYS"]
OUTPUTS = {"joined": "out", "late": "out-late"}
"""The directory with the rows of each stream."""
CHECKPOINTS = {"joined": "checkpoint", "late": "checkpoint-late"}
BUCKET = "soak"
PUBLISHED = f"s3://{BUCKET}/published"
"""Plain files: a directory `v=…` for each publish, whose rows all carry its number. The keys below `BASE_KEYS` come with it,
the others a moment later."""
MANAGED = f"s3://{BUCKET}/table"
"""The table of a history."""
BASE_KEYS = KEYS * 3 // 4
PAD_BYTES = 600
"""Of each row of a publish: bytes that cannot be compressed."""
MAX_BYTES = 6 * 1024 * 1024
"""`lookup.cache.max-bytes` of each host: some publishes with their snapshots, so that there is always something to evict."""
OF_PUBLISHED = {
    "lookup.cache": "FULL",
    "lookup.partition": "max_pt()",
    "lookup.on-version-gone": "FAIL",  # rather than two publishes in one micro-batch
    "lookup.full-cache.retain": "20 s",
}
OF_MANAGED = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "120"}
