"""What all other packages share: clocks, metrics, threads, and checks of decoded values."""

import platform
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - wherever pip did not check it
    raise ImportError(
        f"pyspark_lookup needs Python 3.10 or newer, and {sys.executable} is {platform.python_version()}: run Spark's driver and workers on a newer "
        "one (PYSPARK_PYTHON)"
    )
