"""Iceberg tables. PyIceberg asks catalogs and decodes manifests; everything else is read here."""
