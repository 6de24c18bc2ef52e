"""ORC files as others than pyarrow write them: what pyarrow has written, with another footer."""

import io
from typing import Any

import pyarrow as pa
from pyarrow import orc

JULIAN, PROLEPTIC = 1, 2


def varint(number: int) -> bytes:
    """A number as Protocol Buffers have it."""
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def orc_file(
    table: pa.Table,
    calendar: int | None = None,
    writer: int | None = None,
    zone: str = "GMT",
    spark: bool = False,
    **more: Any,
) -> bytes:
    """An ORC file whose footer names a calendar, and a writer (0: Java's); `zone`: of three letters. `spark`: written by Spark."""
    out = io.BytesIO()
    orc.write_table(table, out, compression="uncompressed", **more)
    content = out.getvalue().replace(b"\x1a\x03GMT", b"\x1a\x03" + zone.encode())
    file = orc.ORCFile(io.BytesIO(content))
    postscript = content[-1 - file.file_postscript_length : -1]
    end = len(content) - 1 - len(postscript)
    footer = content[end - file.file_footer_length : end]
    # Of a field that is given twice the last one counts.
    footer += b"" if calendar is None else varint(11 << 3) + varint(calendar)
    footer += b"" if writer is None else varint(9 << 3) + varint(writer)
    if spark:
        version = (
            varint(1 << 3 | 2) + varint(24) + b"org.apache.spark.version" + varint(2 << 3 | 2) + varint(5) + b"2.4.8"
        )
        footer += varint(5 << 3 | 2) + varint(len(version)) + version
    length = len(varint(8) + varint(file.file_footer_length))
    postscript = varint(8) + varint(len(footer)) + postscript[length:]
    return content[: end - file.file_footer_length] + footer + postscript + bytes([len(postscript)])
