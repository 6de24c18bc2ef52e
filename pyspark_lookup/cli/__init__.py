"""`pyspark-lookup`: the command line, for people and for scripts. It needs neither Spark nor Java.

Exit codes: 0 success; 1 failure of the store, the table or the disk; 2 wrong arguments or options; 3 a key has no row (`get`), this host has
no counters of the table (`stats`), or something is damaged (`check`). With `--json`, each command prints one JSON document to stdout, and
nothing else.
"""

try:
    from pyspark_lookup.cli.main import main
except ImportError as problem:
    if (problem.name or "").startswith("pyspark_lookup"):
        raise
    if not isinstance(problem, ModuleNotFoundError):  # a pyarrow that does not fit NumPy
        raise SystemExit(str(problem)) from None
    raise SystemExit(f"{problem.name} is not installed: pip install 'pyspark-lookup[cli]'") from None

__all__ = ["main"]
