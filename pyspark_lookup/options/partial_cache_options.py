"""Options of the partial cache (FLIP-221)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.options.declaring import BOOLEAN, DURATION, LONG, MOST, option, size
from pyspark_lookup.options.enums import CacheMode

if TYPE_CHECKING:
    from pyspark_lookup.options.lookup_options import LookupOptions

PARTIAL = "lookup.partial-cache."


@dataclasses.dataclass(frozen=True)
class PartialCacheOptions:
    """See `LookupOptions`, of which these are a part."""

    # fmt: off
    partial_expire_after_access_s: float | None = option(
        "lookup.partial-cache.expire-after-access", DURATION, None,
        doc="With PARTIAL: forget a key that was not asked for so long. At least one of the four bounds is needed.",
    )
    partial_expire_after_write_s: float | None = option(
        "lookup.partial-cache.expire-after-write", DURATION, None,
        doc="With PARTIAL: forget a key so long after it was loaded. Needed for a provider without versions.",
    )
    partial_max_rows: int | None = option(
        "lookup.partial-cache.max-rows", LONG, None,
        doc="With PARTIAL: rows to hold at most, in each process and in what the processes of a host share; a key "
            "without rows counts as one.",
    )
    partial_max_bytes: int | None = option(
        "lookup.partial-cache.max-bytes", size(0, MOST), None,
        doc="With PARTIAL: bytes to hold at most, in each process and in what the processes of a host share.",
    )
    partial_cache_missing_key: bool = option(
        "lookup.partial-cache.cache-missing-key", BOOLEAN, True,
        doc="With PARTIAL: remember that a key has no rows.",
    )
    # fmt: on

    @property
    def bounded(self) -> bool:
        """Whether anything bounds the partial cache."""
        return any(value is not None for name, value in self.partial_cache.items() if name != "cache_missing_key")

    @property
    def partial_cache(self) -> dict[str, Any]:
        """What bounds the partial cache, by the parameters of `DefaultLookupCache`."""
        names = (field.name for field in dataclasses.fields(PartialCacheOptions))
        return {name.removeprefix("partial_"): getattr(self, name) for name in names}


def check_partial_cache(options: LookupOptions) -> None:
    """Raise OptionError for options of the partial cache that would be ignored, or without any bound."""
    given = sorted(key for key in options.explicit if key.startswith(PARTIAL))
    if options.cache is not CacheMode.PARTIAL:
        if given:
            raise OptionError(
                f"option {given[0]}: lookup.cache is {options.cache.value!r} and should be 'PARTIAL' for it to have a meaning"
            )
        return
    bounds = ("expire-after-access", "expire-after-write", "max-rows", "max-bytes")
    if not options.bounded and options.provider is None:
        raise OptionError(
            "option lookup.cache = 'PARTIAL' without any bound would grow for ever: set one of "
            + ", ".join(PARTIAL + bound for bound in bounds)
        )
