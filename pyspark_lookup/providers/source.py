"""`ProviderSource`: the versions of a provider's table, which its `version()` names."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import FileVersion, Listing
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.providers.provider import ProvidedTable
from pyspark_lookup.table.model import TableVersion, VersionMetadata
from pyspark_lookup.table.source import Answer, Question, SourceParts, VersionSource


class ProviderSource(VersionSource):
    """The table of one provider, as one file whose identity is the provider's version."""

    kinds = ("PROVIDER",)
    retained = False

    def __init__(self, provided: ProvidedTable, parts: SourceParts) -> None:
        super().__init__(parts)
        self._provided = provided

    @classmethod
    def kind_of(cls, status: FileVersion | Listing) -> str | None:
        return cls.kinds[0]

    def check_options(self, options: LookupOptions, kind: str) -> None:
        self._refuse_pin(options)  # what else has no meaning is refused where the option is declared

    def format_of(self, files: Sequence[FileVersion]) -> FileFormatName | None:
        return None

    def current(self, question: Question) -> Answer:
        table, status = question.table, question.status
        file = status if isinstance(status, FileVersion) else self._parts.ufs.get_meta(table.url)
        digest = key_of(table.id, file.url, file.size, file.identity)
        schema = text_of_schema(self._provided.schema)
        metadata = VersionMetadata(self._provided.name, None, "", digest, (), schema)
        return Answer(TableVersion(table.id, (file,), metadata), question.started_s)
