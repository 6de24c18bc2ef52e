"""Iceberg tables. PyIceberg asks catalogs and decodes manifests; this package reads everything else."""
