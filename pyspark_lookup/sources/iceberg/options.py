"""Options of an Iceberg table: its catalog, and the branch or tag that is read."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.groups import Pin, Ref
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.options.parsing import Kind, option, parse_text


@dataclasses.dataclass(frozen=True)
class IcebergOptions(KindOptions):
    """The table's catalog, and the branch or tag that is read."""

    catalog_keys: ClassVar[frozenset[str]] = frozenset({"lookup.catalog"})

    # fmt: off
    catalog: str | None = option(
        "lookup.catalog", Kind("name", parse_text), None,
        doc="The Iceberg catalog of the table, by its name in PyIceberg's configuration; `path` is then "
            "`namespace.table`.",
    )
    catalog_properties: tuple[tuple[str, str], ...] = option(
        "lookup.catalog.*", Kind("any", str), (),
        doc="Properties of that catalog, instead of those in PyIceberg's configuration, e.g. `lookup.catalog.uri`; "
            "never credentials.",
        secrets="give it to PyIceberg, in .pyiceberg.yaml or in the environment of each machine that reads",
    )
    branch: str | None = option(
        "lookup.branch", Kind("name", parse_text), None, default_text="`main`",
        doc="Iceberg tables: read the current snapshot of this branch.",
    )
    tag: str | None = option(
        "lookup.tag", Kind("name", parse_text), None,
        doc="Iceberg tables: read the snapshot that this tag names.",
    )
    # fmt: on

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.catalog, self.catalog_properties

    @property
    def pins(self) -> dict[str, Pin]:
        names_by_kind = {"branch": self.branch, "tag": self.tag}
        return {f"lookup.{kind}": Ref(kind, name) for kind, name in names_by_kind.items() if name is not None}

    def check(self, options: LookupOptions) -> None:
        if self.catalog is None:
            if self.catalog_properties:
                key = f"lookup.catalog.{self.catalog_properties[0][0]}"
                raise OptionError(f"option {key} is a property of an Iceberg catalog: set lookup.catalog, or remove it")
            return
        if options.system is not None:
            raise OptionError(f"options lookup.catalog and {options.system} both say where the table is: give one")
        if "." not in options.files.path.strip("."):
            raise OptionError(
                f"option path = {options.files.path!r}: with lookup.catalog = {self.catalog!r} give the table's name, namespace.table"
            )
