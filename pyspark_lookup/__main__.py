"""`python -m pyspark_lookup` runs the same command line as `pyspark-lookup`."""

from pyspark_lookup.cli import main

if __name__ == "__main__":
    main()
