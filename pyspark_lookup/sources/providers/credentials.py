"""Credentials of other systems: options never have them, but name a function that returns them where they are needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from pyspark_lookup.errors import LookupFunctionError, OptionError

CREDENTIALS = "lookup.credentials"
Credentials = Callable[[str], Mapping[str, str]]
"""Returns, for the URL of a system, a dictionary of texts by name, such as `user` and `password`."""


def credentials_function(name: str) -> Credentials:
    """The function `module:function`, which is imported when it is called.

    Raises LookupFunctionError, without the function's own error, if it fails; OptionError if it returns anything but texts by name.
    """

    def call(url: str) -> Mapping[str, str]:
        module, _, path = name.partition(":")
        try:
            function: Any = importlib.import_module(module)
            for part in path.split("."):
                function = getattr(function, part)
            answer = function(url)
        except Exception as problem:
            # Its text may hold the password, in a form that is not recognised.
            raise LookupFunctionError(
                f"option {CREDENTIALS} names {name!r}, which failed with {type(problem).__name__}"
            ) from None
        texts = isinstance(answer, Mapping) and all(isinstance(text, str) for item in answer.items() for text in item)
        if not texts:
            raise OptionError(
                f"option {CREDENTIALS} names {name!r}, which must return a dictionary of texts by name, such as user and password"
            )
        return dict(answer)

    return call
