"""Options of an Iceberg table: which catalog knows it, and which branch or tag of it is read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.parsing import Kind, option, parse_text

if TYPE_CHECKING:
    from pyspark_lookup.options.lookup_options import LookupOptions

CATALOG = "lookup.catalog."


@dataclasses.dataclass(frozen=True)
class Ref:
    """A named reference to a snapshot: `kind` is `branch` or `tag`."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class IcebergOptions:
    # fmt: off
    catalog: str | None = option(
        "lookup.catalog", Kind("name", parse_text), None,
        doc="The Iceberg catalog that knows the table, by its name in PyIceberg's configuration; `path` is then `namespace.table`.",
    )
    catalog_properties: tuple[tuple[str, str], ...] = option(
        "lookup.catalog.*", Kind("any", str), (),
        doc="Properties of that catalog in place of PyIceberg's configuration, e.g. `lookup.catalog.uri`; never credentials.",
    )
    branch: str | None = option(
        "lookup.branch", Kind("name", parse_text), None, default_text="`main`",
        doc="Of an Iceberg table: read the current snapshot of this branch.",
    )
    tag: str | None = option(
        "lookup.tag", Kind("name", parse_text), None,
        doc="Of an Iceberg table: read the snapshot that this tag names.",
    )
    # fmt: on

    @property
    def ref(self) -> dict[str, Ref]:
        """The options that name a reference, and what they name."""
        names_by_kind = {"branch": self.branch, "tag": self.tag}
        return {f"lookup.{kind}": Ref(kind, name) for kind, name in names_by_kind.items() if name is not None}


def check_catalog(options: LookupOptions) -> None:
    """Raise OptionError for properties of a catalog without one, and for a catalog beside what has none."""
    if options.catalog is None:
        if options.catalog_properties:
            key = CATALOG + options.catalog_properties[0][0]
            raise OptionError(f"option {key} is a property of an Iceberg catalog: set lookup.catalog, or remove it")
        return
    if options.provider is not None:
        raise OptionError("options lookup.catalog and lookup.provider both say where the table is: give one")
    if "." not in options.path.strip("."):
        raise OptionError(
            f"option path = {options.path!r}: with lookup.catalog = {options.catalog!r} it is the table's name, namespace.table"
        )
