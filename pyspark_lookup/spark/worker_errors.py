"""Makes Spark show an error of this package that ends a worker as its message in one line, without a traceback.

Spark formats an error with the frames of its worker, of this package and of all causes, unless an environment variable of the process says
to hide them. A worker process ends with its first error, so setting the variable affects that error only.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_HIDE = "SPARK_HIDE_TRACEBACK"


def without_traceback(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for a function that a worker calls, or whose generator it reads: Spark then shows only the message of our errors."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        try:
            result = function(*arguments, **named)
        except Exception as problem:
            _hide_frames(problem)
            raise
        return _read(result) if isinstance(result, types.GeneratorType) else result

    return wrapper


def errors_without_traceback(cls: _Class) -> _Class:
    """A decorator for a class whose public methods Spark's workers call: `without_traceback` for each of them."""
    for name, method in list(vars(cls).items()):
        # Without a stream's reader, Spark fails again when it stops it, and only the frames of that error show why there is none.
        if isinstance(method, types.FunctionType) and not name.startswith("_") and name != "streamReader":
            setattr(cls, name, without_traceback(method))
    return cls


def _read(values: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from values
    except Exception as problem:
        _hide_frames(problem)
        raise


def _hide_frames(problem: Exception) -> None:
    """Tell Spark's worker to show no traceback, if Spark started this process and the error is one of this package's own."""
    is_own_error = any(kind.__name__ == "PysparkLookupError" for kind in type(problem).__mro__)
    if is_own_error and any(name.startswith("PYTHON_WORKER_FACTORY_") for name in os.environ):
        os.environ[_HIDE] = "1"
