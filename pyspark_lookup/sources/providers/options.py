"""Options of a provider's table, which is in another system."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.conf_file import STORAGE
from pyspark_lookup.options.enums import RetryPredicate
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.options.parsing import POSITIVE_COUNT, POSITIVE_DURATION, Kind, choice, option, parse_factory


@dataclasses.dataclass(frozen=True)
class ProviderOptions(KindOptions):
    """The provider of the table's rows, and how it is called."""

    system_keys: ClassVar[frozenset[str]] = frozenset({"lookup.provider"})
    suggestions: ClassVar[dict[str, str]] = {"lookupasync": "lookup.provider"}

    # fmt: off
    provider: str | None = option(
        "lookup.provider", Kind("`module:factory`", parse_factory), None,
        doc="A table of any other system, instead of files. The factory takes a `LookupContext` and returns a "
            "`LookupProvider`.",
    )
    parameters: tuple[tuple[str, str], ...] = option(
        "lookup.provider.*", Kind("any", str), (),
        doc="Passed to the provider, e.g. `lookup.provider.table`; never credentials.",
        secrets="let the provider read it from the environment or from a file of its own",
    )
    async_capacity: int = option(
        "lookup.async.capacity", POSITIVE_COUNT, 100,
        doc="Asynchronous providers: the maximum number of concurrent calls.",
    )
    async_timeout_s: float = option(
        "lookup.async.timeout", POSITIVE_DURATION, 180.0, default_text="3 min",
        doc="Providers: how long a call may take, retries included. Also applies to each batch of scan(), and to the "
            "factory.",
    )
    retry_predicate: RetryPredicate | None = option(
        "lookup.retry.predicate", choice(RetryPredicate), None,
        doc="Providers: look up keys without rows again before they are cached as missing (FLIP-234). Needs "
            "`lookup.retry.fixed-delay` and `lookup.retry.max-attempts`.",
    )
    retry_fixed_delay_s: float | None = option(
        "lookup.retry.fixed-delay", POSITIVE_DURATION, None,
        doc="Providers: the pause before keys without rows are looked up again.",
    )
    retry_max_attempts: int | None = option(
        "lookup.retry.max-attempts", POSITIVE_COUNT, None,
        doc="Providers: how often keys without rows are looked up again, at most.",
    )
    # fmt: on

    @property
    def system(self) -> str | None:
        return None if self.provider is None else "lookup.provider"

    @property
    def place(self) -> str:
        return f"provider {self.provider}"

    def check(self, options: LookupOptions) -> None:
        if (self.retry_predicate, self.retry_fixed_delay_s, self.retry_max_attempts).count(None) not in (0, 3):
            raise OptionError(
                "options lookup.retry.predicate, lookup.retry.fixed-delay and lookup.retry.max-attempts: give all three or none"
            )
        if self.provider is None:
            misplaced = [key for key in options.explicit if key.startswith(("lookup.async.", "lookup.retry."))]
            misplaced += [f"lookup.provider.{key}" for key, _ in self.parameters]
            if misplaced:
                raise OptionError(
                    f"option {min(misplaced)} is for tables of a provider: set lookup.provider, or remove it"
                )
            return
        of_files = {"lookup.format", "lookup.partition", "lookup.success-file", "lookup.settle"}
        of_files |= {"lookup.on-busy", "lookup.busy-wait", "lookup.busy-timeout", "lookup.schema"}
        of_files |= {key for key in options.explicit if key.startswith("lookup.csv.")}
        file_options = sorted(of_files & options.explicit) + [STORAGE + key for key, _ in options.storage.parameters]
        if file_options:
            raise OptionError(
                f"option {min(file_options)} is for tables of files and has no meaning with lookup.provider: remove it"
            )
