"""Shared by all other packages: clocks, metrics, threads, and checks of decoded values."""
