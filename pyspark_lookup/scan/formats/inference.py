"""Infers the types of columns in CSV and JSON files, and converts their texts to these types.

Nothing is lost: a column stays text if one of its values, after conversion, would be written as a different text from the one that was read. A
column gets one type for all files of a table (`join_inferred`). Integers beyond int64 become decimals; times with an offset become instants.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.types import decimal_of_text, widens
from pyspark_lookup.errors import SchemaError

_INTEGER = r"^(0|-?[1-9]\d*)$"
_SHORT_INTEGER = r"^(0|-?[1-9]\d{0,14})$"
_FRACTION = r"^-?(0|[1-9]\d*)\.\d+$"
_SHORTEST = r"\.(0|\d*[1-9])$"  # a fraction without superfluous zeros at its end
_NEGATIVE_ZERO = r"^-0\.0+$"
_SPECIAL = ("NaN", "Infinity", "-Infinity")
_HEXADECIMAL = r"^[+-]?0[xX]"
_DATE = r"^\d{4}-\d\d-\d\d$"
_TIME = r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?"
_OFFSET = r"(Z|[+-]\d\d(:?\d\d)?)$"
# The words of each spelling of booleans. No arrays, because making one imports pandas.
_BOOLEANS = {f"boolean {word('true')}": (word("true"), word("false")) for word in (str, str.upper, str.capitalize)}
# Matches the beginning of each text that can be a value of a type that is not text.
_NO_TEXT = re.compile(r"-?\d|-?Infinity|NaN|[tT]rue|TRUE|[fF]alse|FALSE", re.ASCII)
_SURE_DIGITS = 15  # a double keeps each number of up to this many digits
EXACT_INTEGER = 2**53  # a double keeps each integer up to this one
MANY_DIGITS = 99  # more digits after the point than any decimal type has
_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")


@dataclasses.dataclass(frozen=True)
class Number:
    """The properties of a column's numbers that decide its type.

    `whole`: the most digits that a number has before the point. `scales`: the fewest and the most digits after the point, in numbers with a
    point. `integers`: whether there are numbers without a point. `fractions`: whether there are numbers with a point. `fits64`: whether all
    integers fit into int64. `exact`: whether a double can hold each number, and each is written without superfluous digits.
    """

    whole: int
    scales: tuple[int, int]
    integers: bool
    fractions: bool
    fits64: bool
    exact: bool

    def join(self, other: Number) -> Number:
        scale_ranges = [number.scales for number in (self, other) if number.fractions] or [(0, 0)]
        scales = min(fewest for fewest, _ in scale_ranges), max(most for _, most in scale_ranges)
        return Number(
            max(self.whole, other.whole),
            scales,
            self.integers or other.integers,
            self.fractions or other.fractions,
            self.fits64 and other.fits64,
            self.exact and other.exact,
        )

    def type(self) -> pa.DataType:
        if not self.fractions:
            return pa.int64() if self.fits64 else _decimal(self.whole, 0, 20)
        if self.exact:
            return pa.float64()
        # The type has more digits than needed, so that a larger number in a later file does not change the type.
        uniform = not self.integers and self.scales[0] == self.scales[1]
        return _decimal(self.whole, self.scales[0], 18) if uniform else pa.string()


def _decimal(whole: int, scale: int, precision: int) -> pa.DataType:
    for digits in (precision, 38):
        if whole + scale <= digits:
            return pa.decimal128(digits, scale)
    return pa.string()


@dataclasses.dataclass(frozen=True)
class Inferred:
    """What the values of a column in a CSV or JSON file show of its type.

    `kind`: a key of `_TYPES`, "number" (described by `number`), "list" (of `element`) or "struct" (of `fields`).
    """

    kind: str
    number: Number | None = None
    element: Inferred | None = None
    fields: tuple[tuple[str, Inferred], ...] = ()

    def type(self) -> pa.DataType:
        """The Arrow type; Arrow's null type if the values show none."""
        if self.number is not None:
            return self.number.type()
        if self.element is not None:
            return pa.list_(pa.field("element", self.element.type()))
        if self.kind == "struct":
            return pa.struct([pa.field(name, inferred.type()) for name, inferred in self.fields])
        return _TYPES[self.kind]


_TYPES = {
    "nothing": pa.null(),
    "empty": pa.string(),
    "text": pa.string(),
    "special": pa.string(),
    **dict.fromkeys(_BOOLEANS, pa.bool_()),
    "date": pa.date32(),
    "instant": _INSTANT,
    "local": _LOCAL,
}
NOTHING, TEXT, BOOLEAN, _EMPTY = (Inferred(kind) for kind in ("nothing", "text", "boolean true", "empty"))
_ONLY_SPECIAL = Inferred("special")  # words such as NaN, which are numbers if the column has other numbers, too
_SPECIAL_NUMBER = Number(0, (0, MANY_DIGITS), integers=False, fractions=True, fits64=True, exact=True)


def join_inferred(first: Inferred, second: Inferred) -> Inferred:
    """The inferred type of a column. Some of its values alone would have the inferred type `first`, the others `second`."""
    if first.kind != second.kind:
        for tells_least in (NOTHING, _EMPTY):
            if tells_least in (first, second):
                return second if first == tells_least else first
        for words, numbers in ((first, second), (second, first)):
            if words == _ONLY_SPECIAL and numbers.number is not None:
                return dataclasses.replace(numbers, number=numbers.number.join(_SPECIAL_NUMBER))
        return TEXT
    if first.number is not None and second.number is not None:
        return dataclasses.replace(first, number=first.number.join(second.number))
    if first.element is not None and second.element is not None:
        return dataclasses.replace(first, element=join_inferred(first.element, second.element))
    if first.kind == "struct":
        fields = dict(first.fields)
        for name, inferred in second.fields:
            fields[name] = join_inferred(fields.get(name, NOTHING), inferred)
        return dataclasses.replace(first, fields=tuple(fields.items()))
    return first


def fits(inferred: Inferred, kind: pa.DataType) -> bool:
    """Whether values of an inferred type can be read as `kind` without a loss."""
    inferred_type = inferred.type()
    if inferred_type == kind or pa.types.is_string(kind) or widens(inferred_type, kind):
        return True
    if inferred == _ONLY_SPECIAL:
        return bool(pa.types.is_float64(kind))
    if inferred.number is not None and pa.types.is_decimal(kind):
        return bool(inferred.number.whole <= kind.precision - kind.scale and inferred.number.scales[1] <= kind.scale)
    if inferred.number is not None:
        return inferred.number.exact and bool(pa.types.is_float64(kind))
    if inferred.element is not None:
        return bool(pa.types.is_list(kind)) and fits(inferred.element, kind.value_type)
    if not pa.types.is_struct(kind):
        return False
    types = {field.name: field.type for field in kind}
    return all(name in types and fits(part, types[name]) for name, part in inferred.fields)


def infer_texts(texts: pa.Array, by_value: bool = False) -> Inferred:
    """The inferred type of a column of texts, as in a CSV file. `by_value`: zeros at the end of a fraction do not count as digits.

    Empty texts show nothing if there are other texts, because writers that quote all values write "" for null.
    """
    empty = len(texts) > texts.null_count
    texts = texts.filter(pc.not_equal(texts, ""))
    if by_value:
        texts = pc.replace_substring_regex(texts, r"^(-?\d+\.\d+?)0+$", r"\1")
    if not len(texts):
        return _EMPTY if empty else NOTHING
    if _NO_TEXT.match(texts[0].as_py()) is None:
        return TEXT
    if (number := infer_numbers(texts)) is not None:
        return Inferred("number", number)
    if _all(pc.is_in(texts, value_set=pa.array(_SPECIAL))):
        return _ONLY_SPECIAL
    for spelled, words in _BOOLEANS.items():
        if _all(pc.is_in(texts, value_set=pa.array(words))):
            return Inferred(spelled)
    if _matches(texts, _DATE) and _is_in_python(texts, pa.date32()):
        return Inferred("date")
    return infer_times(texts)


def infer_times(texts: pa.Array) -> Inferred:
    """The inferred type of texts that may be times: instants if all have an offset, local times if all are times without one, otherwise text."""
    for kind, pattern in (("instant", _TIME + _OFFSET), ("local", _TIME + "$")):
        if _matches(texts, pattern) and _is_in_python(texts, _TYPES[kind]):
            return Inferred(kind)
    return TEXT


def infer_numbers(texts: pa.Array) -> Number | None:
    """The properties of the numbers in `texts`, of which none may be null; None if a text is not a number, or is spelled unusually, such as `007`."""
    if _matches(texts, _SHORT_INTEGER):
        return Number(pc.max(pc.utf8_length(pc.utf8_ltrim(texts, "-"))).as_py(), (0, 0), True, False, True, True)
    integers = pc.match_substring_regex(texts, _INTEGER)
    fractions = pc.match_substring_regex(texts, _FRACTION)
    special = pc.is_in(texts, value_set=pa.array(_SPECIAL))
    if not _all(pc.or_(pc.or_(integers, fractions), special)) or _all(special):
        return None
    whole, fractional = texts.filter(integers), texts.filter(fractions)
    digits = pc.utf8_length(pc.utf8_ltrim(texts.filter(pc.invert(special)), "-"))
    points = pc.find_substring(pc.utf8_ltrim(fractional, "-"), ".")
    scales = pc.subtract(pc.subtract(pc.utf8_length(pc.utf8_ltrim(fractional, "-")), points), 1)
    before = [pc.max(pc.utf8_length(pc.utf8_ltrim(whole, "-"))).as_py() or 0, pc.max(points).as_py() or 0]
    bounds = pc.min_max(scales).as_py()
    sure = pc.max(digits).as_py() <= _SURE_DIGITS
    fits64 = before[0] <= 18 or _parses(whole, pa.int64())
    exact = _matches(fractional, _SHORTEST) and (
        sure or (_exact_integers(whole, fits64) and _exact_fractions(fractional))
    )
    negative = _any(pc.match_substring_regex(texts, _NEGATIVE_ZERO))  # decimals have no negative zero
    scales = (0, MANY_DIGITS) if _any(special) or negative else (bounds["min"] or 0, bounds["max"] or 0)
    return Number(max(before), scales, bool(len(whole)), bool(len(fractional)) or _any(special), fits64, exact)


def _exact_integers(texts: pa.Array, fits64: bool) -> bool:
    if not len(texts):
        return True
    bounds = pc.min_max(texts.cast(pa.int64())).as_py() if fits64 else None
    return bounds is not None and bounds["min"] >= -EXACT_INTEGER and bounds["max"] <= EXACT_INTEGER


def _exact_fractions(texts: pa.Array) -> bool:
    """Whether each text is the shortest one for the double that it stands for, apart from the notation of exponents."""
    long = texts.filter(pc.greater(pc.utf8_length(texts), _SURE_DIGITS + 1))
    return all(is_exact(text) for text in long.to_pylist())


def is_exact(text: str) -> bool:
    """Whether a text is the shortest one for a double: with fewer digits it would stand for another double."""
    return f"{float(text)!r}" == text or _plain(repr(float(text))) == _plain(text)


@functools.lru_cache(maxsize=1024)
def _plain(text: str) -> tuple[str, int]:
    """(the digits of a number without leading and trailing zeros, the power of ten of the last digit)."""
    mantissa, _, exponent = text.lower().partition("e")
    head, _, tail = mantissa.partition(".")
    digits = (head.lstrip("-") + tail).lstrip("0")
    significant = digits.rstrip("0")
    return (
        "-" * mantissa.startswith("-") + significant,
        int(exponent or 0) - len(tail) + len(digits) - len(significant),
    )


def convert(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """The texts as values of type `kind`, as Arrow parses them. An empty text becomes null, unless `kind` is text or binary.

    Raises a SchemaError that quotes a text that is not a value of this type.
    """
    if texts.type == kind:
        return texts
    if pa.types.is_null(kind) or texts.null_count == len(texts):
        return pa.nulls(len(texts), kind)
    if pa.types.is_nested(kind):
        raise SchemaError(f"text is not a valid {kind}")
    if not pa.types.is_binary(kind):
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    if pa.types.is_decimal(kind):
        return _decimals(texts, kind)
    if pa.types.is_integer(kind) and _any(pc.match_substring_regex(texts, _HEXADECIMAL)):  # to Arrow 0xFFFFFFFF is -1
        text = texts.filter(pc.match_substring_regex(texts, _HEXADECIMAL))[0].as_py()
        raise SchemaError(f"{text[:80]!r} is not a valid {kind}")
    try:
        return texts.cast(kind)
    except pa.ArrowNotImplementedError:
        raise SchemaError(f"text is not a valid {kind}") from None
    except pa.ArrowInvalid:
        for text in texts.drop_null().to_pylist():
            if not _parses(pa.array([text]), kind):
                raise SchemaError(f"{text[:80]!r} is not a valid {kind}") from None
        raise


def _decimals(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """The texts as decimals of type `kind`. Raises SchemaError for a text that is not such a decimal.

    Arrow casts only plainly written texts that fit: for others, its cast may return a wrong number or end the process.
    """
    digits = rf"\d{{1,{kind.precision - kind.scale}}}" if kind.precision > kind.scale else "0"
    plain = pc.match_substring_regex(texts, rf"^[+-]?0*{digits}(\.\d{{0,{kind.scale}}})?$")
    if _all(plain):
        return texts.cast(kind)
    try:
        numbers = [decimal_of_text(text, kind) for text in texts.filter(pc.invert(plain)).to_pylist()]
    except ValueError as problem:
        raise SchemaError(str(problem)) from None
    cast = pc.if_else(plain, texts, pa.scalar(None, pa.string())).cast(kind)
    return pc.replace_with_mask(cast, pc.fill_null(pc.invert(plain), False), pa.array(numbers, kind))


def _parses(texts: pa.Array, kind: pa.DataType) -> bool:
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _is_in_python(texts: pa.Array, kind: pa.DataType) -> bool:
    """Whether all texts are dates (or times, as `kind` says) in the years 1 to 9999, the only ones that Python's types can hold."""
    if not _parses(texts, kind):
        return False
    years = pc.min_max(pc.year(texts.cast(kind))).as_py()
    return bool(years["min"] >= 1 and years["max"] <= 9999)


def _matches(texts: pa.Array, pattern: str) -> bool:
    return _all(pc.match_substring_regex(texts, pattern))


def _all(mask: pa.Array) -> bool:
    return bool(pc.all(mask, min_count=0).as_py())


def _any(mask: pa.Array) -> bool:
    return bool(pc.any(mask, min_count=0).as_py())
