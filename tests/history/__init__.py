"""Histories of real processes that write and read one managed table, and a checker that knows nothing of ours."""
