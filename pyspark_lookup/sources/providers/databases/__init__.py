"""Tables of SQL databases, which users describe by options, without code: PostgreSQL, MySQL, MariaDB, SQLite, DuckDB, and those with an ADBC driver.

A database is a provider like any other: its rows are looked up and scanned through the interfaces of the package `providers`. Each kind of
database has a module, with a `Database` and its `Connection`; `database_table.py` lists them.
"""
