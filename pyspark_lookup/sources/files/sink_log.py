"""The files that a streaming file sink has committed, by its log (`_spark_metadata`)."""

from __future__ import annotations

import json

from pyspark_lookup.core.decoding import UNREADABLE, as_text
from pyspark_lookup.errors import DamagedFileError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.stores import FileVersion, Listing


def select_committed(blocks: BlockCache, listing: Listing, files: tuple[FileVersion, ...]) -> tuple[FileVersion, ...]:
    """The files that a streaming file sink's log (`_spark_metadata`) has committed.

    Log files are `<batch>` or `<batch>.compact`, a version line and one JSON object per file; the
    last compact one holds all before it. Raises DamagedFileError for one that is not so.
    """
    prefix = f"{listing.url}/_spark_metadata/"
    logs: dict[int, tuple[bool, FileVersion]] = {}
    for file in listing.files:
        name = file.url.removeprefix(prefix)
        batch = name.removesuffix(".compact")
        if file.url.startswith(prefix) and batch.isdecimal() and file.size > 0:
            logs[int(batch)] = max(
                (name.endswith(".compact"), file), logs.get(int(batch), (False, file)), key=lambda e: e[0]
            )
    start = max((batch for batch, (compact, _) in logs.items() if compact), default=0)
    log_files = [logs[batch][1] for batch in sorted(logs) if batch >= start]
    locations = [blocks.get_blocks_and_locations(file.url, file) for file in log_files]
    texts = blocks.read([(location, [(0, location.file.size)]) for location in locations])
    committed_names: set[str] = set()
    for file, (data,) in zip(log_files, texts, strict=True):
        try:
            for line in bytes(data).decode().splitlines()[1:]:
                entry = json.loads(line)
                name = as_text(entry["path"]).rsplit("/", 1)[-1]
                (committed_names.discard if entry.get("action") == "delete" else committed_names.add)(name)
        except UNREADABLE as problem:
            raise DamagedFileError(f"{redact('path', file.url)} is no log of a streaming sink: {problem!r}") from None
    return tuple(file for file in files if file.url.rsplit("/", 1)[-1] in committed_names)
