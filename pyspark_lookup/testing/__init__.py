"""Checks for tests of code that others write for this package: `check_provider` checks a provider against the rules in docs/providers.md.

Needs no test framework: what breaks a rule raises a `ProviderCheckError`, which is an AssertionError.
"""

from pyspark_lookup.testing.provider_check import check_provider
from pyspark_lookup.testing.rules import RULES, ProviderCheckError

__all__ = ["RULES", "ProviderCheckError", "check_provider"]
