"""Looks up customers in an SQLite database, and follows its changes: python examples/sqlite_lookup.py"""

import contextlib
import sqlite3
import tempfile

from pyspark_lookup import LookupTable

home = tempfile.mkdtemp()
with contextlib.closing(sqlite3.connect(f"{home}/shop.db")) as db, db:
    db.executescript("""
        CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
        INSERT INTO customers VALUES (1, 'Ann', 'Oslo'), (2, 'Bob', 'Bergen');
        CREATE TABLE customers_version (n INTEGER);
        INSERT INTO customers_version VALUES (0);
        CREATE TRIGGER customers_inserted AFTER INSERT ON customers BEGIN UPDATE customers_version SET n = n + 1; END;
        CREATE TRIGGER customers_updated AFTER UPDATE ON customers BEGIN UPDATE customers_version SET n = n + 1; END;
        CREATE TRIGGER customers_deleted AFTER DELETE ON customers BEGIN UPDATE customers_version SET n = n + 1; END;
    """)

options = {
    "lookup.table": "customers",
    "lookup.keys": "id",
    "lookup.version-query": "SELECT n FROM customers_version",
    "lookup.cache": "PARTIAL",
    "lookup.partial-cache.max-rows": 100_000,
}
with LookupTable(f"sqlite:///{home}/shop.db", options) as customers:
    print(customers.get(2), customers.get(3))
    with contextlib.closing(sqlite3.connect(f"{home}/shop.db")) as db, db:
        db.execute("UPDATE customers SET city = 'Hamar' WHERE id = 2")
    print(customers.get(2))
