"""The kinds of databases, by the schemes of their URLs."""

from __future__ import annotations

from pyspark_lookup.sources.providers.databases.adbc import Bigquery, FlightSql, Snowflake
from pyspark_lookup.sources.providers.databases.database import Database
from pyspark_lookup.sources.providers.databases.duckdb import Duckdb
from pyspark_lookup.sources.providers.databases.mysql import Mysql
from pyspark_lookup.sources.providers.databases.postgresql import Postgresql
from pyspark_lookup.sources.providers.databases.sqlite import Sqlite

DATABASES: dict[str, type[Database]] = {
    "bigquery": Bigquery,
    "duckdb": Duckdb,
    "flightsql": FlightSql,
    "mariadb": Mysql,
    "mysql": Mysql,
    "postgres": Postgresql,
    "postgresql": Postgresql,
    "snowflake": Snowflake,
    "sqlite": Sqlite,
}
