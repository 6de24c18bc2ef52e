"""The faults that the tests have to catch: put into copies of the package, one at a time."""
