"""Credentials of other systems. Options never hold them: an option names a function, which returns them where they are needed."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from pyspark_lookup.errors import LookupFunctionError, OptionError
from pyspark_lookup.options.lookup_options import KindOptions
from pyspark_lookup.options.parsing import Kind, option, parse_function

CREDENTIALS = "lookup.credentials"
Credentials = Callable[[str], Mapping[str, str]]
"""Takes the URL of a system and returns a dictionary of texts by name, such as `user` and `password`."""


@dataclasses.dataclass(frozen=True)
class CredentialOptions(KindOptions):
    """The option that names the function."""

    credentials: str | None = option(
        CREDENTIALS, Kind("`module:function`", parse_function), None,
        doc="Databases, HTTP, Redis and Unity Catalog: a function that takes the URL and returns a dictionary with `user`, `password` or both. For HTTP, "
            "it may return a `token`, or headers by name, instead; for Unity Catalog, it returns a `token`, or `client_id` and `client_secret`. Each "
            "process calls it when it connects. For HTTP and Unity Catalog, the answer is kept, and the function is called again after status 401, or "
            "when a token that was obtained with `client_id` and `client_secret` expires.",
    )  # fmt: skip

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.credentials,)

    @property
    def function(self) -> Credentials | None:
        """The function; None if none is named."""
        return None if self.credentials is None else credentials_function(self.credentials)


def credentials_function(name: str) -> Credentials:
    """The function `module:function`, which is imported when it is called.

    If the function fails, raises LookupFunctionError without the function's message. Raises OptionError if it returns anything but texts by name.
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
                f"the function {name!r}, which option {CREDENTIALS} names, failed with {type(problem).__name__}. Its message may hold a secret, so it is left out: "
                "call the function yourself to see it"
            ) from None
        texts = isinstance(answer, Mapping) and all(isinstance(text, str) for item in answer.items() for text in item)
        if not texts:
            raise OptionError(
                f"the function {name!r}, which option {CREDENTIALS} names, must return a dictionary whose keys and values are str, "
                "e.g. with a user and a password, or with a token"
            )
        return dict(answer)

    return call
