"""VARIANT values in pure Python: `encode`, `decode` and `shred`, as Parquet's VariantEncoding.md and VariantShredding.md describe them.

A value is a dict (an object), a list (an array), or a pair of a primitive type's name and its value.
"""

import datetime
import decimal
import random
import struct
from typing import Any

import pyarrow as pa

UTC = datetime.timezone.utc
_EPOCH = datetime.datetime(1970, 1, 1)
_NUMBERS = {"int8": (3, "b"), "int16": (4, "h"), "int32": (5, "i"), "int64": (6, "q"), "float": (14, "f"), "double": (7, "d")} | {
    "date": (11, "i"), "timestamp": (12, "q"), "timestamp_ntz": (13, "q"), "time": (17, "q"), "timestamp_ns": (18, "q"), "timestamp_ntz_ns": (19, "q")
}  # fmt: skip
_DECIMALS = {8: 4, 9: 8, 10: 16}
ARROW = {
    "boolean": pa.bool_(), "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "decimal4": pa.decimal128(9, 2), "decimal8": pa.decimal128(18, 0),
    "decimal16": pa.decimal128(38, 20), "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"), "time": pa.time64("us"), "timestamp_ns": pa.timestamp("ns", "UTC"),
    "timestamp_ntz_ns": pa.timestamp("ns"), "string": pa.string(), "binary": pa.binary(), "uuid": pa.binary(16),
}  # fmt: skip
"""The Arrow type of each primitive type but null."""
NULL = ("null", None)


def field_names(value: Any) -> set[str]:
    """The names of all fields in a value."""
    if isinstance(value, dict):
        return {*value, *(name for part in value.values() for name in field_names(part))}
    return {name for part in value for name in field_names(part)} if isinstance(value, list) else set()


def encode_metadata(names: list[str], width: int = 1) -> bytes:
    texts = [name.encode() for name in names]
    ends = [sum(map(len, texts[:n])) for n in range(len(texts) + 1)]
    numbers = b"".join(number.to_bytes(width, "little") for number in (len(texts), *ends))
    return bytes([1 | (width - 1) << 6]) + numbers + b"".join(texts)


def encode(value: Any, names: list[str], rng: random.Random) -> bytes:
    """A value with the metadata of `names`. Numbers of fields and offsets may take more bytes than they need, and an object's values are in any
    order."""
    if isinstance(value, (dict, list)):
        parts = [value[name] for name in sorted(value, key=str.encode)] if isinstance(value, dict) else value
        encoded = [encode(part, names, rng) for part in parts]
        order = list(range(len(encoded)))
        if isinstance(value, dict):
            rng.shuffle(order)
        begins, size = [0] * len(encoded), 0
        for place in order:
            begins[place], size = size, size + len(encoded[place])
        width = rng.randint((size.bit_length() + 7) // 8 or 1, 4)
        large = len(encoded) > 255 or rng.random() < 0.2
        count = len(encoded).to_bytes(4 if large else 1, "little")
        offsets = b"".join(number.to_bytes(width, "little") for number in (*begins, size))
        body = b"".join(encoded[place] for place in order)
        if isinstance(value, list):
            return bytes([3 | (width - 1) << 2 | large << 4]) + count + offsets + body
        id_width = rng.randint(2 if len(names) > 255 else 1, 4)
        ids = b"".join(names.index(name).to_bytes(id_width, "little") for name in sorted(value, key=str.encode))
        return bytes([2 | (width - 1) << 2 | (id_width - 1) << 4 | large << 6]) + count + ids + offsets + body
    kind, plain = value
    if kind == "null":
        return b"\0"
    if kind == "boolean":
        return bytes([(1 if plain else 2) << 2])
    if kind in _NUMBERS:
        number, code = _NUMBERS[kind]
        return bytes([number << 2]) + struct.pack(f"<{code}", plain)
    if kind.startswith("decimal"):
        scale, unscaled = plain
        width = int(kind.removeprefix("decimal"))
        number = {4: 8, 8: 9, 16: 10}[width]
        return bytes([number << 2, scale]) + unscaled.to_bytes(width, "little", signed=True)
    if kind == "uuid":
        return bytes([20 << 2]) + plain
    data = plain.encode() if kind == "string" else plain
    if kind == "string" and len(data) < 64 and rng.random() < 0.8:
        return bytes([1 | len(data) << 2]) + data
    return bytes([(16 if kind == "string" else 15) << 2]) + len(data).to_bytes(4, "little") + data


def decode(metadata: bytes, data: bytes) -> Any:
    """The value that a pair of bytes stands for."""
    width = (metadata[0] >> 6) + 1
    numbers = [int.from_bytes(metadata[at : at + width], "little") for at in range(1, len(metadata), width)]
    count = numbers[0]
    texts = metadata[1 + width * (count + 2) :]
    names = [texts[numbers[1 + n] : numbers[2 + n]].decode() for n in range(count)]
    return _decode(names, data)


def _decode(names: list[str], data: bytes) -> Any:
    basic, header = data[0] & 3, data[0] >> 2
    if basic == 1:
        return "string", data[1 : 1 + header].decode()
    if basic >= 2:
        width, id_width = (header & 3) + 1, (header >> 2 & 3) + 1 if basic == 2 else 0
        at = 5 if header >> (4 if basic == 2 else 2) & 1 else 2
        count = int.from_bytes(data[1:at], "little")
        ids = [int.from_bytes(data[at + n * id_width : at + (n + 1) * id_width], "little") for n in range(count)]
        at += count * id_width
        begins = [int.from_bytes(data[at + n * width : at + (n + 1) * width], "little") for n in range(count)]
        at += (count + 1) * width
        parts = [_decode(names, data[at + begin :]) for begin in begins]
        if basic == 3:
            return parts
        keys = [names[number] for number in ids]
        assert keys == sorted(set(keys), key=str.encode)
        return dict(zip(keys, parts, strict=True))
    if header <= 2:
        return NULL if header == 0 else ("boolean", header == 1)
    for kind, (number, code) in _NUMBERS.items():
        if header == number:
            return kind, struct.unpack_from(f"<{code}", data, 1)[0]
    if header in _DECIMALS:
        width = _DECIMALS[header]
        return f"decimal{width}", (data[1], int.from_bytes(data[2 : 2 + width], "little", signed=True))
    if header == 20:
        return "uuid", data[1:17]
    end = 5 + int.from_bytes(data[1:5], "little")
    return ("string", data[5:end].decode()) if header == 16 else ("binary", data[5:end])


def typed_value_type(shape: Any) -> pa.DataType:
    """The Arrow type of `typed_value`. `shape`: the name of a primitive type, a dict of shapes by field, or a list of one shape. The shape None has no
    `typed_value`."""
    if isinstance(shape, dict):
        return pa.struct([pa.field(name, node_type(part), nullable=False) for name, part in shape.items()])
    if isinstance(shape, list):
        return pa.list_(pa.field("element", node_type(shape[0]), nullable=False))
    return ARROW[shape]


def node_type(shape: Any, *more: pa.Field) -> pa.DataType:
    typed = [] if shape is None else [pa.field("typed_value", typed_value_type(shape))]
    return pa.struct([*more, pa.field("value", pa.binary()), *typed])


def shred(value: Any, shape: Any, names: list[str], rng: random.Random) -> dict[str, Any]:
    """`value` and `typed_value` of a node of a shredded column. `value`: None if it is missing."""
    if value is None:
        return {"value": None, "typed_value": None}
    if isinstance(shape, dict) and isinstance(value, dict):
        typed = {name: shred(value.get(name), part, names, rng) for name, part in shape.items()}
        unshredded = {name: part for name, part in value.items() if name not in shape}
        return {"value": encode(unshredded, names, rng) if unshredded else None, "typed_value": typed}
    if isinstance(shape, list) and isinstance(value, list):
        return {"value": None, "typed_value": [shred(part, shape[0], names, rng) for part in value]}
    if isinstance(shape, str) and isinstance(value, tuple) and value[0] == shape:
        plain = value[1]
        if shape.startswith("decimal"):
            scale, unscaled = plain
            if scale != ARROW[shape].scale:
                return {"value": encode(value, names, rng), "typed_value": None}
            plain = decimal.Decimal(unscaled).scaleb(-scale, decimal.Context(prec=76))
        if shape == "date":
            plain = _EPOCH.date() + datetime.timedelta(days=plain)
        return {"value": None, "typed_value": plain}
    return {"value": encode(value, names, rng), "typed_value": None}


def random_value(rng: random.Random, depth: int = 3) -> Any:
    draw = rng.random()
    if depth and draw < 0.35:
        return {name: random_value(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 5))}
    if depth and draw < 0.5:
        return [
            random_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3, 300 if rng.random() < 0.05 else 4)))
        ]
    return random_primitive(rng, rng.choice(("null", *ARROW)))


NAMES = ["a", "b", "ab", "B", "", "é", "z" * 70, "a.b", "value", "typed_value"]


def random_primitive(rng: random.Random, kind: str) -> Any:
    if kind == "null":
        return NULL
    if kind == "boolean":
        return kind, rng.random() < 0.5
    if kind in ("float", "double"):
        return kind, float(rng.randint(-1000, 1000)) / 4
    if kind.startswith("decimal"):
        digits = {"decimal4": 9, "decimal8": 18, "decimal16": 38}[kind]
        scale = ARROW[kind].scale if rng.random() < 0.8 else rng.randint(0, digits)
        return kind, (scale, rng.randint(1 - 10**digits, 10**digits - 1))
    if kind in ("string", "binary"):
        text = rng.choice("xyzß") * rng.choice((0, 1, 5, 63, 64, 65, 300))
        return kind, text if kind == "string" else text.encode()
    if kind == "uuid":
        return kind, rng.randbytes(16)
    bits = {"int8": 7, "int16": 15, "int32": 31, "date": 16, "time": 36}.get(kind, 50)
    return kind, rng.randint(0 if kind == "time" else -(2**bits), 2**bits - 1)


def random_shape(rng: random.Random, depth: int = 3) -> Any:
    draw = rng.random()
    if depth and draw < 0.45:
        return {name: random_shape(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(1, 4))}
    if depth and draw < 0.65:
        return [random_shape(rng, depth - 1)]
    return None if depth < 3 and draw > 0.95 else rng.choice(list(ARROW))


def fitting_value(rng: random.Random, shape: Any) -> Any:
    """A value that is mostly of the types of a shape, so that much of it is shredded."""
    if shape is None or rng.random() < 0.15:
        return random_value(rng, 2)
    if isinstance(shape, dict):
        value = {name: fitting_value(rng, part) for name, part in shape.items() if rng.random() < 0.8}
        more = random_value(rng, 1)
        return {**(more if isinstance(more, dict) else {}), **value}
    if isinstance(shape, list):
        return [fitting_value(rng, shape[0]) for _ in range(rng.randint(0, 4))]
    return random_primitive(rng, shape)


def shredded(values: list[Any], shape: Any, rng: random.Random, nullable: bool = True) -> pa.Array:
    """A column in the parts by which Parquet stores it. `values`: None for a null."""
    rows = []
    for value in values:
        names = sorted(field_names(value)) if value is not None else []
        unused = [f"unused{n}" for n in range(rng.choice((0, 0, 1, 300)))]
        names = names + unused
        rng.shuffle(names)
        size = sum(len(name.encode()) for name in names)
        metadata = encode_metadata(names, rng.randint((max(size, len(names)).bit_length() + 7) // 8 or 1, 4))
        rows.append(None if value is None else {"metadata": metadata, **shred(value, shape, names, rng)})
    return pa.array(rows, node_type(shape, pa.field("metadata", pa.binary(), nullable=False)))
