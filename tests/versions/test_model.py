"""Files and directories whose names have wildcards in them: they are read by their names; patterns that match them take an escape."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import OptionError, TableEmptyError, TableFormatError
from tests.support.data_files import write_parquet
from tests.support.fuzzing import by_day

NAMES = ("a?b", "a*b", "a[1]b", "a{1,2}b", "?", "[")
BESIDE = "a1b"  # what the first three match
Writer = Callable[[str, int], None]
Place = tuple[str, dict[str, str], Writer]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A directory's path, the options by which it is read, and what puts a Parquet file with one row there."""
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")}
    if request.param == "local":
        return str(tmp_path / "lake"), options, lambda name, id_: write_parquet(tmp_path / "lake" / name, id=[id_])
    server, bucket = request.getfixturevalue("s3"), request.getfixturevalue("bucket")

    def put_object(name: str, id_: int) -> None:
        path = write_parquet(tmp_path / "one.parquet", id=[id_])
        server.client.put_object(Bucket=bucket, Key=f"lake/{name}", Body=path.read_bytes())

    return f"s3://{bucket}/lake", {**options, "lookup.storage.endpoint_url": server.endpoint}, put_object


def ids(path: str, options: dict[str, str]) -> list[int]:
    with LookupTable(path, options) as table:
        numbers = sorted(table.scan().column("id").to_pylist())
        assert [table.get(id_) for id_ in numbers] == [[{"id": id_}] for id_ in numbers]
    return numbers


@pytest.mark.parametrize("place", by_day(["local", "s3"], 2), indirect=True)
def test_an_exact_name_wins(place: Place) -> None:
    """An exact name wins over the pattern that it would be, of files and of directories, also with a slash, and in a directory that is read as a whole."""
    root, options, write = place
    write(f"{BESIDE}.parquet", 99)
    write(f"{BESIDE}/x.parquet", 99)
    for number, name in enumerate(NAMES):
        write(f"files/{name}.parquet", number)
        write(f"{name}.parquet", number)
        write(f"{name}/x?.parquet", number)
    for number, name in enumerate(NAMES):
        for path in (f"{name}.parquet", name, f"{name}/", f"{name}/x?.parquet"):
            assert ids(f"{root}/{path}", options) == [number], path
    assert ids(f"{root}/files", options) == list(range(len(NAMES)))
    assert ids(f"{root}/files", {**options, "lookup.cache": "FULL"}) == list(range(len(NAMES)))


def test_patterns_are_patterns_where_nothing_has_their_name(place: Place) -> None:
    """A wildcard that stands for itself is escaped: by a backslash, as in Spark, or as a class of it alone. That costs one more call for a process."""
    root, options, write = place
    for number, name in enumerate(["a1b", "a2b", "a?b", "a[1]b"]):
        write(f"{name}/x.parquet", number)
    assert ids(f"{root}/a[12]b", options) == [0, 1]
    for pattern in (r"a\?b/*.parquet", r"a[?]b/*", r"a\?b/x.parquet", r"*\?*"):
        assert ids(f"{root}/{pattern}", options) == [2], pattern
    for pattern in (r"a\[1\]b/*", "a[[]1]b/*"):
        assert ids(f"{root}/{pattern}", options) == [3], pattern
    with pytest.raises(TableEmptyError, match="no file matches the glob"):
        ids(f"{root}/b[12]b", options)


def test_tables_of_others_and_ours(tmp_path: Path) -> None:
    """Delta tables and managed ones by names with wildcards, which came there by renaming; places inside them are refused as ever."""
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")}
    with LookupTable(str(tmp_path / "plain"), options) as table:
        table.write([{"id": 1}])
    write_deltalake(tmp_path / "delta", pa.table({"id": [1], "p": ["x"]}), partition_by=["p"])
    for name in ("managed?", "managed[1]"):
        shutil.copytree(tmp_path / "plain", tmp_path / name)
        with LookupTable(str(tmp_path / name), options) as table:
            table.upsert([{"id": 2}])
            assert sorted(table.scan().column("id").to_pylist()) == [1, 2]
    for name in ("delta?", "d[e]lta"):
        shutil.copytree(tmp_path / "delta", tmp_path / name)
        with LookupTable(str(tmp_path / name), options) as table:
            assert table.get(1) == [{"id": 1, "p": "x"}]
        with pytest.raises(TableFormatError, match="lies inside"):
            LookupTable(f"{tmp_path}/{name}/p=x", options).scan()
    for use in (lambda table: table.write([{"id": 1}]), LookupTable.vacuum, LookupTable.compact):
        with pytest.raises(OptionError, match="give a managed table a path without wildcards"):
            use(LookupTable(str(tmp_path / "new[1]"), options))
