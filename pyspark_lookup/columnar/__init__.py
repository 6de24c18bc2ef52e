"""Columns of rows: keys, their index, types and predicates. The hot path."""
