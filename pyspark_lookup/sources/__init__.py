"""One package for each kind of table: how a path is recognised as such a table, which versions it has, and what cannot be read."""
