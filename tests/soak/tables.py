"""The two tables of a soak: where they are, what is in them, and how the stream reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import boto3
import pyarrow as pa
from botocore.config import Config

BUCKET = "soak"
PUBLISHED = f"s3://{BUCKET}/published"
"""Plain files: a directory `v=…` for each publish, whose rows all carry its number. The keys below `BASE_KEYS` come with it,
the others a moment later."""
MANAGED = f"s3://{BUCKET}/managed"
"""A managed table with the columns that the checker of histories knows. Each commit gives all keys one new epoch: what its tags
begin with."""
KEYS = 2000
BASE_KEYS = 1500
PAD_BYTES = 40

MAX_BYTES = 2 * 1024 * 1024
"""`lookup.cache.max-bytes` of each host: a dozen publishes, so that there is always something to evict."""
OF_PUBLISHED = {
    "lookup.cache": "FULL",
    "lookup.partition": "max_pt()",
    "lookup.on-version-gone": "FAIL",  # rather than two publishes in one micro-batch
    "lookup.full-cache.retain": "20 s",
}
OF_MANAGED = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1200"}


def storage(endpoint: str) -> dict[str, Any]:
    """The options that lead to a store."""
    return {"lookup.storage.endpoint_url": endpoint}


def client(endpoint: str, attempts: int = 8) -> Any:
    """S3 itself, at a store or through a proxy."""
    return boto3.client("s3", endpoint_url=endpoint, config=Config(retries={"total_max_attempts": attempts}))


def names_below(s3: Any, prefix: str, bucket: str = BUCKET) -> list[str]:
    """The keys of a prefix, in order."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return sorted(found["Key"] for page in pages for found in page.get("Contents", []))


def padded(rng: Any, keys: Sequence[int], **columns: Any) -> pa.Table:
    """Rows with something in them that does not compress, and with one value in each of the columns."""
    pads = [rng.randbytes(PAD_BYTES) for _ in keys]
    return pa.table({"id": pa.array(keys, pa.int64()), **{n: [v] * len(keys) for n, v in columns.items()}, "pad": pads})
