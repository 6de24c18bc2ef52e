"""LZO1X, with which some writers of ORC compress; pyarrow has no codec for it."""

from __future__ import annotations


def decompress_lzo(data: memoryview, at_most: int) -> bytes:
    """The decompressed bytes of a block. Raises ValueError for a damaged block, or one of more than `at_most` bytes."""
    try:
        return _decompress(data, at_most)
    except IndexError:
        raise ValueError("an LZO block that ends too soon") from None


def _decompress(data: memoryview, at_most: int) -> bytes:
    output = bytearray()
    at = 0

    def read_length(bits: int, most: int) -> int:
        """A length in the low bits of an instruction: 0 stands for `most`, 255 for each zero byte that follows, and the byte behind."""
        nonlocal at
        if bits:
            return bits
        length = most
        while data[at] == 0:
            length, at = length + 255, at + 1
            if length > at_most:
                raise ValueError("an LZO block that is longer than it may be")
        at += 1
        return length + data[at - 1]

    def literals(count: int) -> None:
        nonlocal at, output
        if at + count > len(data):
            raise IndexError(at)
        if len(output) + count > at_most:
            raise ValueError("an LZO block that is longer than it may be")
        output += data[at : at + count]
        at += count

    state = 0  # how many literals came last: 1 to 3, or 4 for more; 0: none
    if data[0] > 17:
        at, state = 1, min(data[0] - 17, 4)
        literals(data[0] - 17)
    while True:
        code = data[at]
        at += 1
        if code < 16 and state == 0:
            literals(3 + read_length(code, 15))
            state = 4
            continue
        if code < 16:
            distance = (data[at] << 2) + (code >> 2) + (2049 if state == 4 else 1)
            at, length, state = at + 1, 3 if state == 4 else 2, code & 3
        elif code < 64:
            few = code < 32
            length = 2 + (read_length(code & 7, 7) if few else read_length(code & 31, 31))
            low = data[at] | data[at + 1] << 8
            distance = (((code & 8) << 11) + 16384 if few else 1) + (low >> 2)
            at, state = at + 2, low & 3
            if few and distance == 16384:
                return bytes(output)
        else:
            length = 3 + (code >> 5 & 1) if code < 128 else 5 + (code >> 5 & 3)
            distance = (data[at] << 3) + (code >> 2 & 7) + 1
            at, state = at + 1, code & 3
        if distance > len(output) or len(output) + length > at_most:
            raise ValueError("an LZO block that makes no sense")
        _repeat(output, distance, length)
        literals(state)


def _repeat(output: bytearray, distance: int, length: int) -> None:
    """Append `length` bytes copied from `distance` bytes back, repeating them if there are fewer."""
    start = len(output) - distance
    pattern = output[start : start + length]
    output += (pattern * (length // len(pattern) + 1))[:length]
