"""Iceberg tables: PyIceberg reads catalogs and manifests, where a pointer is resolved; everything else is read here."""
