"""`WriteSizes`: the sizes at which writes and compactions of a managed table behave differently."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.sources.managed.log.events import PAGE

_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class WriteSizes:
    """Sizes in bytes, those of a `Runtime`; tests shrink them, so that small tables have many files, row groups and compactions.

    `file_bytes`: of rows in memory, sorted and written as one file; four times as many are sorted together where they come in
    order. `row_group_bytes` and `row_group_rows` (at least, at most): of a row group. `merge_bytes`: of files, whose rows a
    compaction puts in order together. A compaction takes writes of less than `compact_bytes` whatever else there is;
    one that nobody asked for those of less than `unasked_compact_bytes`, and none of more than `unasked_write_bytes`. Files of
    less than `small_file_bytes` on the average are too many. `log_page`: events of a page of a new table's log.
    """

    file_bytes: int = 128 * _MIB
    row_group_bytes: int = _MIB
    row_group_rows: tuple[int, int] = (1024, 128 * 1024)
    merge_bytes: int = 32 * _MIB
    compact_bytes: int = 64 * _MIB
    unasked_compact_bytes: int = 4 * _MIB
    unasked_write_bytes: int = 256 * _MIB
    small_file_bytes: int = 8 * _MIB
    log_page: int = PAGE
