"""`python -m pyspark_lookup` is `pyspark-lookup`."""

from pyspark_lookup.cli import main

if __name__ == "__main__":
    main()
