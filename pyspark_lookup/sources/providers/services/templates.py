"""`KeyTemplate`: a text with the names of key columns in braces, such as `customer:{id}`."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import pyarrow as pa

from pyspark_lookup.errors import OptionError
from pyspark_lookup.sources.providers.functions import FinalLookupError

Encode = Callable[[str], str]


class KeyTemplate:
    """A text that key columns complete. `names`: the columns that it names, in order. `literals`: the texts before, between and after them.

    Raises OptionError, which names the option, for a text that cannot be parsed, or in which nothing tells where a value ends.
    """

    def __init__(self, option: str, text: str) -> None:
        self.option, self.text = option, text
        self.names: list[str] = []
        self.literals: list[str] = [""]
        try:
            for literal, name, spec, conversion in string.Formatter().parse(text):
                self.literals[-1] += literal
                if name is None:
                    continue
                if not name or spec or conversion:
                    raise ValueError
                self.names.append(name)
                self.literals.append("")
        except ValueError:
            raise OptionError(
                f"option {option} = {text!r}: expected key columns in braces, such as {{id}}; double any other brace"
            ) from None
        if "" in self.literals[1:-1]:
            raise OptionError(f"option {option} = {text!r}: put a separator between the values, as in {{a}}:{{b}}")

    def check(self, keys: Sequence[str]) -> None:
        """Raise OptionError unless the template names each of the columns `keys`, and no other column."""
        check_names(self.option, self.text, self.names, keys)

    def fill(self, values: Sequence[str], encode: Encode = str) -> str:
        """The text for one key. `values`: the texts of its columns, in the order of `names`. `encode`: makes a value safe for its place.

        Raises FinalLookupError for a key whose text could be that of another key, because a value contains the separator behind it.
        """
        parts = [self.literals[0]]
        for number, value in enumerate(map(encode, values)):
            separator = self.literals[number + 1]
            if number + 1 < len(values) and (value + separator).find(separator) < len(value):
                raise FinalLookupError(
                    f"option {self.option} = {self.text!r}: {self.names[number]} = {values[number]!r} contains {separator!r}, which separates it from the "
                    "next value, so two keys could give the same string: use a separator that no value contains"
                )
            parts += [value, separator]
        return "".join(parts)


def check_names(option: str, text: str, names: Sequence[str], keys: Sequence[str]) -> None:
    """Raise OptionError unless `names`, which the text of an option has in braces, are the columns `keys`."""
    lower = [name.lower() for name in names]
    unknown = [name for name in names if name.lower() not in {key.lower() for key in keys}]
    missing = [key for key in keys if key.lower() not in lower]
    if unknown:
        raise OptionError(
            f"option {option} = {text!r}: {{{unknown[0]}}} is not a key column: lookup.keys names {', '.join(keys) or 'none'}"
        )
    if missing:
        raise OptionError(f"option {option} = {text!r}: the key column {{{missing[0]}}} is missing: name it in braces")


def check_key_type(option: str, field: pa.Field) -> None:
    """Raise OptionError unless each value of a key column has only one spelling."""
    kind = field.type
    spelled = (
        pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_boolean(kind)
    )
    if not spelled:
        raise OptionError(
            f"option {option}: key column {field.name!r} is {kind}, whose values have more than one spelling: declare it as STRING in lookup.schema, "
            "or as a whole number, DATE or BOOLEAN"
        )


def texts_of_keys(keys: pa.Table, names: Sequence[str]) -> list[tuple[str, ...]]:
    """For each key, the texts of the columns `names`, in any letter case. Dates are spelled as in ISO 8601."""
    positions = {name.lower(): number for number, name in enumerate(keys.column_names)}
    columns = [keys.column(positions[name.lower()]).cast(pa.string()).to_pylist() for name in names]
    return list(zip(*columns, strict=True))
