"""What a user's own module makes, where an option names it as `module:factory`."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from pyspark_lookup.base.errors import OptionError, cause_of

T = TypeVar("T")


def make(option: str, name: str, argument: Any, kind: type[T]) -> T:
    """What the factory `name` makes of `argument`. Raises OptionError if it cannot be imported or called, or makes no `kind`."""
    module, _, path = name.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in path.split("."):
            factory = getattr(factory, part)
        made = factory(argument)
    except OptionError:
        raise
    except Exception as problem:  # whatever a user's module does when it is imported or called
        raise OptionError(f"option {option} = {name!r} cannot be made: {problem!r}") from cause_of(problem)
    if not isinstance(made, kind):
        raise OptionError(f"option {option} = {name!r} returned {made!r}: return a {kind.__name__}")
    return made
