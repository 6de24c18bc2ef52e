"""Makes Spark show only the message of an error of this package, without a traceback, if the error ends a Python worker.

Spark shows an error with the traceback of the worker and of all its causes, unless the environment variable SPARK_HIDE_TRACEBACK of the
worker's process is set. A worker process ends with its first error, so setting the variable at that moment
affects no other error.
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
    """A decorator for a function that a Python worker calls: Spark then shows only the message of an error of this package. If the function is a
    generator, this includes errors raised while the worker reads it."""

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
    """A decorator for a class whose public methods Python workers call: it applies `without_traceback` to each of them."""
    for name, method in list(vars(cls).items()):
        # If `streamReader` fails, Spark later fails again when it stops the missing reader, and only that error's traceback shows the cause.
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
    """Tell Spark to show no traceback, if this process is a Python worker and the error is one of this package's own."""
    is_own_error = any(kind.__name__ == "PysparkLookupError" for kind in type(problem).__mro__)
    if is_own_error and any(name.startswith("PYTHON_WORKER_FACTORY_") for name in os.environ):
        os.environ[_HIDE] = "1"
