"""Lookup providers to copy: tables of databases behind `lookup.provider`."""
