"""The kinds of tables, one package for each: how a path is recognised as a table of that kind, which versions it has, and what is refused."""
