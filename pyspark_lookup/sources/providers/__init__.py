"""Tables of other systems, read through a provider that the user writes.

This package makes the provider from the options, limits the time of its calls, repeats failed calls and checks the rows that they return.
"""
