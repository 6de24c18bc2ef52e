"""What a user sets: every `lookup.*` option, its type and its default; the conf file; a catalog table's own."""
