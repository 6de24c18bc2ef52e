"""The rules of the house: who may import whom and what, what is public, what importing costs."""

import ast
import configparser
import dataclasses
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pyspark_lookup
from pyspark_lookup import errors
from pyspark_lookup.sources.registry import OPTIONS
from pyspark_lookup.storage.disk.records import _RECORDS_KEPT_S
from tests.support.broken_imports import BLOCKER

ROOT = Path(pyspark_lookup.__file__).parent
ORDER = [
    "core", "columnar", "options", "storage", "versions", "scan", "cache", "sources", "lookup", "testing", "spark", "", "cli",
    "__main__",
]  # fmt: skip
KNOWN_BY = {
    "aiohttp": {"sources.providers.services.http_function"},
    "adbc_driver_postgresql": {"sources.providers.databases.postgresql"},
    "aiobotocore": {"storage.stores.s3"},
    "botocore": {"storage.stores.s3"},
    "click": {"cli"},
    "diskcache": {"cache.diskcache_database"},
    "duckdb": {"sources.providers.databases.duckdb"},
    "fsspec": {"storage.stores"},
    "jmespath": {"sources.providers.services.answers"},
    "google": {"storage.stores.vended"},
    "jinja2": {"cli.report"},
    "numpy": {"storage.stores.listed_files", "columnar.predicate", "columnar.buffers", "columnar.calendars", "columnar.keys", "scan.table_scan", "scan.formats.text", "scan.formats.orc", "scan.open_file", "scan.equality", "scan.merged_files", "scan.footers", "versions", "sources.delta", "sources.files", "sources.iceberg", "columnar.roaring", "cache", "sources.managed.change_feed", "sources.managed.conflicts", "sources.providers", "lookup.late_facts", "lookup.lookup_join", "lookup.lookup", "lookup.range_match", "lookup.snapshot_ranges", "columnar.ranges", "columnar.networks", "columnar.variants", "cli.advise", "testing.sample_keys"},
    "prometheus_client": {"cli.host_commands"},
    "py4j": {"spark.micro_batch"},
    "pyarrow": {"columnar", "storage.stores.listed_files", "versions", "scan", "cache", "sources", "lookup", "testing", "spark", "cli"},
    "pydantic": {"sources.iceberg.pyiceberg_catalog"},
    "pyiceberg": {"sources.iceberg.avro", "sources.iceberg.manifests", "sources.iceberg.manifest_columns", "sources.iceberg.pyiceberg_catalog"},
    "pyroaring": {"columnar.roaring"},
    "pymysql": {"sources.providers.databases.mysql"},
    "pyspark": {"spark"},
    "redis": {"sources.providers.services.redis"},
    "sqlglot": {"columnar.sql_parser", "columnar.ddl"},
    "tenacity": {"storage.ufs", "sources.providers.provider", "sources.providers.databases.database_table"},
    "tqdm": {"cache.full.full_cache"},
    "urllib3": {"sources.delta.unity"},
    "yarl": {"sources.providers.services.http_function"},
}  # fmt: skip
PUBLISHING = {"os.replace", "os.link", "os.rename", "os.renames", "os.symlink", "shutil.move", "tempfile.mkstemp"}
UNPICKLING = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
NODES = {name: [*ast.walk(ast.parse(path.read_text(), str(path)))] for name, path in MODULES.items()}


@functools.cache
def run_time_nodes(name: str) -> list[tuple[ast.AST, bool]]:
    """Every node of a module that is not for the type checker only, and whether it is inside a function."""
    nodes: list[tuple[ast.AST, bool]] = []
    pending = [(NODES[name][0], False)]
    while pending:
        node, inside = pending.pop()
        nodes.append((node, inside))
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            pending += [(child, inside) for child in node.orelse]
            continue
        within = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, within) for child in ast.iter_child_nodes(node)]
    return nodes


@functools.cache
def imports(name: str) -> set[tuple[str, bool]]:
    """(full name, whether inside a function) of each import that a module makes when it runs."""
    imported: set[tuple[str, bool]] = set()
    for node, inside in run_time_nodes(name):
        if isinstance(node, ast.Import):
            imported |= {(alias.name, inside) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("pyspark_lookup.") in MODULES
                imported.add((whole if is_module else str(node.module), inside))
    return imported


def find_modules(is_meant: Callable[[ast.AST], object]) -> set[str]:
    return {name for name, nodes in NODES.items() if any(map(is_meant, nodes))}


def dotted(node: ast.AST) -> str:
    """A name such as `os.replace`; "" for what precedes the first dot if it is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def find_own_module(full: str) -> str | None:
    """The name within this package of a module's full name. None if it belongs to another package."""
    if full != "pyspark_lookup" and not full.startswith("pyspark_lookup."):
        return None
    return full.removeprefix("pyspark_lookup").lstrip(".")


def package(name: str) -> str:
    """The package of a module. `errors` lies outside all packages for the sake of users, and counts as part of `core`."""
    return "core" if name == "errors" else name.partition(".")[0]


def within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def test_every_package_is_known() -> None:
    """setup.cfg installs the packages that there are, docs/design.md has the same ones, in the order. `dir` shows what is for users."""
    setup = configparser.ConfigParser()
    setup.read(ROOT.parent / "setup.cfg")
    packages = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}
    assert set(setup["options"]["packages"].split()) == packages
    assert {package(name) for name in MODULES} == set(ORDER)
    design = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    table_packages = re.findall(r"^\| `(\w+)/` \|", design, re.MULTILINE)
    assert table_packages == [name for name in ORDER if name not in ("", "__main__")]
    assert dir(pyspark_lookup) == sorted(pyspark_lookup.__all__)


def test_packages_import_those_before_them() -> None:
    """A module imports from its own package and from those before it, inside functions too. None needs itself through top-level imports."""
    imported = [
        (n, module, inside)
        for n in MODULES
        for full, inside in imports(n)
        if (module := find_own_module(full)) is not None
    ]
    assert [(n, m) for n, m, _ in imported if ORDER.index(package(m)) > ORDER.index(package(n))] == []
    needs = {name: {module for n, module, inside in imported if n == name and not inside} for name in MODULES}
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


def test_each_kind_of_table_has_a_room() -> None:
    """Only the registry imports from a kind's package; for managed tables also the code that writes them and follows their changes, and for
    providers the checks of what others write."""
    kinds = {name.split(".")[1] for name in MODULES if name.startswith("sources.") and name.count(".") > 1}
    wrong = []
    for name in MODULES:
        for full, _ in imports(name):
            top, _, module = (find_own_module(full) or "").partition(".")
            kind = module.partition(".")[0] if top == "sources" else ""
            writes = kind == "managed" and package(name) in ("lookup", "spark")
            checks = kind == "providers" and package(name) == "testing"
            if kind in kinds and not (within(name, {f"sources.{kind}", "sources.registry"}) or writes or checks):
                wrong.append((name, full))
    assert wrong == []


def test_options_of_a_kind_are_named_in_its_room() -> None:
    """No text outside of `sources/` names an option of Delta, Iceberg or providers. Docstrings, which are for users, and checks of providers may."""
    of_kinds = [group for group in OPTIONS if not group.__module__.startswith("pyspark_lookup.sources.managed.")]
    keys = [field.metadata["key"].removesuffix("*") for group in of_kinds for field in dataclasses.fields(group)]
    assert keys
    texts = [
        (name, text)
        for name, nodes in NODES.items()
        if not name.startswith(("sources.", "testing."))
        for text in _texts(nodes)
    ]
    assert [(name, key) for name, text in texts for key in keys if key in text] == []


def _texts(nodes: list[ast.AST]) -> Iterator[str]:
    """The texts in a module that are not docstrings."""
    statements = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in statements:
            yield node.value


def test_packages_are_known_by_few() -> None:
    """Only modules that wrap another package import it, and by name. None could run code from a file: we never unpickle."""
    wrong, harmless = [], set(sys.stdlib_module_names) - UNPICKLING
    for name in MODULES:
        foreign = {full.split(".")[0] for full, _ in imports(name) if find_own_module(full) is None} - harmless
        wrong += [
            (name, foreign_package)
            for foreign_package in foreign
            if not within(name, KNOWN_BY.get(foreign_package, set()))
        ]
    assert wrong == []


def test_features_alone_knows_versions_of_spark() -> None:
    """Other modules ask what this Spark can do: none looks at its version, or for a part of PySpark that may be missing."""
    parts = {"pyspark.sql.datasource", "pyspark.sql.streaming.datasource", "pyspark.sql.classic"}
    optional = find_modules(lambda node: isinstance(node, ast.ImportFrom) and node.module in parts)
    versions = find_modules(lambda node: dotted(node) == "pyspark.__version__")
    assert versions == optional == {"spark.features"}


def test_only_disk_publishes() -> None:
    """Files are renamed and linked into place in `storage.disk` alone."""
    wrong = []
    for name, nodes in NODES.items():
        calls = {dotted(node) for node in nodes if isinstance(node, ast.Attribute)} & PUBLISHING
        # The log of a managed table on a local disk is put there by its store.
        calls -= {"os.link"} if name == "storage.stores.local" else set()
        froms = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        if (calls and not within(name, {"storage.disk"})) or {"os", "shutil", "tempfile"} & set(froms):
            wrong.append(name)
    assert wrong == []


def test_few_remove() -> None:
    """Only code that makes sure that files and directories are ours, and that no link leads to them, removes them."""
    removals = {"unlink", "rmdir", "rmtree", "removedirs"}
    removing = find_modules(lambda node: isinstance(node, ast.Attribute) and node.attr in removals)
    assert removing == {"storage.disk.directory", "storage.stores.local"}


def test_records_have_a_lifetime() -> None:
    """Each kind of record in the cache directory is swept at some time."""
    calls = (node for nodes in NODES.values() for node in nodes if isinstance(node, ast.Call))
    puts = [call for call in calls if dotted(call.func).endswith(("create_record", "replace_record", "succeed_record"))]
    kinds = {call.args[0].value for call in puts if call.args and isinstance(call.args[0], ast.Constant)}
    assert "execution" in kinds
    assert kinds - set(_RECORDS_KEPT_S) == set()


def test_what_modules_say() -> None:
    """No module imports a name with an underscore from another, or calls what pyarrow does by importing pandas, which takes long."""

    def is_wrong(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom) and find_own_module(str(node.module)) is not None:
            return any(re.match("_[^_]", alias.name) for alias in node.names)
        return isinstance(node, ast.Attribute) and node.attr in ("to_pandas", "to_pandas_dtype")

    assert find_modules(is_wrong) == set()


def test_a_child_inherits_no_lock() -> None:
    """Objects that live as long as the interpreter have no lock, thread or queue that a fork would inherit, except those of `core.forks`."""
    wrong = []
    for name in MODULES:
        for node, inside in run_time_nodes(name):
            attribute = dotted(node) if isinstance(node, ast.Attribute) else ""
            imported = node.module if isinstance(node, ast.ImportFrom) else ""
            cached = isinstance(node, ast.ImportFrom) and "cached_property" in {alias.name for alias in node.names}
            if name != "core.forks" and (
                attribute == "functools.cached_property" or (cached and imported == "functools")
            ):
                wrong.append(f"{name}: {attribute or imported}")
            called = dotted(node.func) if isinstance(node, ast.Call) and not inside else ""
            if re.match(r"(threading|queue|concurrent\.futures|multiprocessing|asyncio)\.|ThreadPool", called):
                wrong.append(f"{name}: {called}")
            # Such names would not be seen above.
            if imported in ("threading", "queue", "multiprocessing", "asyncio"):
                wrong.append(f"{name}: from {imported}")
    assert wrong == []


def test_causes_are_ours() -> None:
    """`raise … from` names an error of ours: a foreign one, whose text may hold a credential, becomes a cause by `raise_ours`."""
    our_errors = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    wrong = []
    for module, nodes in NODES.items():
        for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
            kinds = {arg.arg: ast.unparse(arg.annotation) for arg in function.args.args if arg.annotation is not None}
            inner = [*ast.walk(function)]
            handlers = [node for node in inner if isinstance(node, ast.ExceptHandler) and node.name]
            kinds |= {str(node.name): ast.unparse(node.type) for node in handlers if node.type is not None}
            for node in inner:
                if isinstance(node, ast.Raise) and isinstance(node.cause, ast.Name) and module:
                    named = set(re.findall(r"\w+", kinds.get(node.cause.id, node.cause.id)))
                    wrong += [f"{module}:{node.lineno} {name}" for name in named - our_errors]
    assert wrong == []


def _rendered(node: ast.AST) -> str:
    """A text as its readers see it, with one word in place of each value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_rendered, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "x1"


def test_what_hides_credentials_spares_our_own_words() -> None:
    """All errors go through `foreign_text`, so a text of ours with a colon after `token`, say, would lose its next word."""
    spoilt = [
        (name, text)
        for name, nodes in NODES.items()
        for call in nodes
        if isinstance(call, ast.Call) and dotted(call.func).endswith("Error")
        for text in map(_rendered, call.args)
        if errors.foreign_text(text) != text
    ]
    assert spoilt == []


def test_threads_are_started_in_one_place() -> None:
    """Threads are started where they are made to end before the interpreter does. Python's pools refuse work once the main thread has ended."""
    starts = re.compile(r"threading\.(Thread|Timer)$|PoolExecutor$|_thread\.start").search
    assert find_modules(lambda node: isinstance(node, ast.Call) and starts(dotted(node.func))) == set()


def test_tests_import_from_no_test() -> None:
    """Nothing is imported from a test module: what several tests share has a module without tests, such as those of `tests.support`."""
    test_import = re.compile(
        r"^ *(?:from \.|(?:from|import) tests\.(?:\w+\.)*test_|from tests[\w.]* import (?:\([^)]*?|.*?)\btest_)",
        re.MULTILINE,
    )
    wrong = [str(path) for path in Path(__file__).parent.rglob("*.py") if test_import.search(path.read_text())]
    assert wrong == []


def python(script: str) -> str:
    """The output of a fresh interpreter that runs `script` with this package on its path."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


# Of Python's own, all that importing the package may bring in: Spark does so in every planner of every query.
LIGHT = {"collections", "contextlib", "copyreg", "enum", "functools", "importlib", "itertools", "keyword", "operator", "re", "reprlib", "types", "typing", "warnings"}  # fmt: skip


def test_importing_brings_in_nothing_heavy() -> None:
    """Importing the package loads no other packages and no modules of ours. Looking for the source, as planners do, does not load the engine."""
    script = (
        "import sys; before = {*sys.modules}; import pyspark_lookup\n"
        "assert not hasattr(pyspark_lookup, 'nonsense')\n"
        "print(pyspark_lookup.__version__, *sorted({*sys.modules} - before))\n"
        "assert hasattr(pyspark_lookup, 'DefaultSource')\n"
        "print(*sorted(m for m in sys.modules if m.startswith('pyspark_lookup.')))"
    )
    first, second = python(script).splitlines()
    version, *modules = first.split()
    assert version == pyspark_lookup.__version__
    foreign = {module.split(".")[0] for module in modules} - LIGHT - {"pyspark_lookup"}
    assert {module for module in foreign if not module.startswith("_") and not module.startswith("sre_")} == set()
    assert [module for module in modules if module.startswith("pyspark_lookup.")] == []
    assert second.split() == list(OUR_MODULES)


def test_a_worker_imports_only_what_it_needs() -> None:
    """A worker lives for seconds. Parsers, clients of stores and catalogs are imported by those who use them, and pandas by pyarrow with the first
    array or scalar, so no module makes one."""
    script = "import sys, pyspark_lookup.spark.reading; print(*sys.modules)"
    lazy = {"aiobotocore", "botocore", "pandas", "pyiceberg", "s3fs", "sqlglot"}
    assert {module.split(".")[0] for module in python(script).split()} & lazy == set()


ASKS = "import pyspark_lookup; print(hasattr(pyspark_lookup, 'DefaultSource'))"
OUR_MODULES = (
    "pyspark_lookup.core", "pyspark_lookup.spark", "pyspark_lookup.spark.features", "pyspark_lookup.spark.source",
    "pyspark_lookup.spark.worker_errors",
)  # fmt: skip


@pytest.mark.parametrize("blocked", ["pyarrow", "fsspec", "sqlglot", "pyspark", *OUR_MODULES])
def test_a_broken_installation_harms_nobody_else(blocked: str) -> None:
    """Spark asks every `pyspark_*` package for its source with hasattr: whatever of ours is broken, that must not raise."""
    answers = {"False"} if blocked.startswith("pyspark") else {"True", str(blocked != "pyarrow")}
    assert python(BLOCKER.format(blocked=[blocked], error="ImportError") + ASKS) in answers


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("lookup_join", "pyspark", "[spark]"), ("LookupTable", "pyarrow", "")]
)
def test_a_name_whose_package_is_missing(name: str, package: str, extra: str) -> None:
    """A name of a missing package is an error that says which Python lacks it, and what to install."""
    hidden = f"import sys; sys.modules[{package!r}] = None\n"  # as Python says it: No module named …
    tried = f"try:\n    from pyspark_lookup import {name}\nexcept ModuleNotFoundError as problem:\n    print(problem)"
    says = python(hidden + tried)
    assert says.endswith(f" in {sys.executable}; pip install 'pyspark-lookup{extra}' there, or run another Python")
    assert says.startswith(f"pyspark_lookup.{name}: ")
