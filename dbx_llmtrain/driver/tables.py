"""Tables of the catalog, Delta tables and DataFrames: found, pinned to a version, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import addresses
from dbx_llmtrain.driver import causes, kept
from dbx_llmtrain.driver.model_files import digest
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.sections import SourceConfig
from dbx_llmtrain.text.readers import Located
from dbx_llmtrain.worker.part import CONTENT, PLACE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DELTA_LOG = "_delta_log"
_NO_SUCH_SOURCE = ("DATA_SOURCE_NOT_FOUND", "Failed to find data source", "ClassNotFoundException")


@dataclass(frozen=True)
class Table:
    """Rows that Spark reads (``frame``) or files of them, and a key of their content.

    ``content``: sum of the hashes in the column ``CONTENT``, to be found again when the rows are
    read; ``None`` where a version pins them. ``rows`` where they were counted. ``placed``: the
    column ``PLACE`` has their order.
    """

    key: list[Any]
    frame: Any = None
    files: tuple[Path, ...] = ()
    content: int | None = None
    rows: int | None = None
    placed: bool = False

    def close(self) -> None:
        """Let go of the rows that Spark keeps."""
        if self.content is not None:
            self.frame.unpersist()


def catalog_table(
    spark: SparkSession, source: SourceConfig, name: str, *, in_order: bool = False
) -> Table:
    """A table of the catalog: Delta ones by id and version, others by their content (``in_order``:
    and its order).

    Raises ``DataError`` for a table that does not exist or cannot be read.
    """
    there = _ask(f"table {name}", lambda: spark.catalog.tableExists(name))
    if not there:
        raise DataError(
            f"there is no table {name} (or this user may not see it): expected "
            "table:catalog.schema.name"
        )
    frame = _ask(f"table {name}", lambda: spark.table(name))
    detail = _detail(spark, name)
    if detail is None:
        if source.version is not None:
            raise DataError(
                f"table {name} is no Delta table: version {source.version} cannot be read"
            )
        return by_content(_limited(frame, source), f"table {name}", in_order=in_order)
    number = _version(spark, name, source)
    frame = _ask(
        f"table {name}, version {number}",
        lambda: spark.read.option("versionAsOf", number).table(name),
    )
    return Table(["delta", detail, number], _limited(frame, source))


def delta_folder(
    spark: SparkSession | None,
    source: SourceConfig,
    path: str,
    cache_dir: Path,
    work_dir: Path | None,
) -> Table:
    """A Delta table by its folder, read by Spark where it knows the format, else by the driver with
    the package ``deltalake``. Raises ``DataError`` when neither can."""
    if spark is not None and _has_delta(spark, path):
        name = f"delta.`{path}`"
        number = _version(spark, name, source)
        frame = _ask(
            f"{source.path}, version {number}",
            lambda: spark.read.format("delta").option("versionAsOf", number).load(path),
        )
        return Table(["delta", _table_id(spark, name), number], _limited(frame, source))
    return _delta_by_driver(source, path, cache_dir, work_dir)


def by_content(frame: DataFrame, told: str, *, in_order: bool = False) -> Table:
    """A DataFrame with a hash of every row, named by the sum of them: one pass over its rows.

    The rows stay on the executors' disks until ``close``, since many a query (a limit, a sample, a
    user's function) would give others the second time. ``in_order``: the same rows in another order
    have another name.
    """
    from pyspark import StorageLevel
    from pyspark.sql import functions as F

    columns = [F.col(f"`{name.replace('`', '``')}`") for name in frame.columns]
    if not columns:
        raise DataError(f"{told} has no columns")
    text = F.to_json(F.struct(*columns), {"ignoreNullFields": "false"})
    place = [F.col(PLACE)] if in_order else []
    placed = frame.withColumn(PLACE, F.monotonically_increasing_id()) if in_order else frame
    first, second = (F.xxhash64(text, F.lit(seed), *place) for seed in (0, 1))
    hashed = placed.withColumn(CONTENT, first).persist(StorageLevel.DISK_ONLY)
    sums = [F.sum(value.cast("decimal(38,0)")) for value in (F.col(CONTENT), second)]
    found = _ask(told, lambda: hashed.agg(F.count(F.lit(1)), *sums).first())
    rows, one, two = (int(value or 0) for value in found)
    key = ["rows", frame.schema.simpleString(), rows, one % 2**64, two % 2**64]
    return Table(key, hashed, content=one % 2**64, rows=rows, placed=in_order)


def first_rows(table: Table, told: str, count: int) -> Iterator[Located]:
    """The first rows of a table."""
    rows = table.frame.drop(CONTENT, PLACE).limit(count)
    found = _ask(told, rows.collect)
    for number, row in enumerate(found, start=1):
        yield row.asDict(recursive=True), f"{told}, row {number}"


def _limited(frame: DataFrame, source: SourceConfig) -> DataFrame:
    return frame if source.max_rows is None else frame.limit(source.max_rows)


def _detail(spark: SparkSession, name: str) -> str | None:
    """Id of a Delta table; ``None`` for another kind of table."""
    described = _ask(
        f"table {name}", lambda: spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    )
    provider = [row["data_type"] for row in described if row["col_name"] == "Provider"]
    if [kind.lower() for kind in provider] != ["delta"]:
        return None
    return _table_id(spark, name)


def _table_id(spark: SparkSession, name: str) -> str:
    row = _ask(f"table {name}", lambda: spark.sql(f"DESCRIBE DETAIL {name}").first())
    return str(row["id"])


def _version(spark: SparkSession, name: str, source: SourceConfig) -> int:
    """The version number that a source stands for: the newest, one given, or that of a time."""
    if isinstance(source.version, int):
        return source.version
    from pyspark.sql import functions as F

    def newest() -> Any:
        history = spark.sql(f"DESCRIBE HISTORY {name}")
        if source.version is not None:
            history = history.where(F.col("timestamp") <= F.to_timestamp(F.lit(source.version)))
        return history.agg(F.max("version")).first()[0]

    number = _ask(f"the history of {source.path}", newest)
    if number is None:
        raise DataError(f"{source.path} has no version of {source.version} or before")
    return int(number)


def _has_delta(spark: SparkSession, path: str) -> bool:
    """Whether this Spark reads Delta tables."""
    try:
        spark.read.format("delta").load(path)
    except Exception as error:
        # The class of it depends on the version of Spark.
        if any(sign in str(error) for sign in _NO_SUCH_SOURCE):
            return False
        raise DataError(
            f"{path} cannot be read as a Delta table: {causes.first_line(error)}{_files(path)}"
        ) from error
    return True


def _delta_by_driver(
    source: SourceConfig, path: str, cache_dir: Path, work_dir: Path | None
) -> Table:
    try:
        import deltalake
    except ImportError as error:
        raise DataError(
            f"{source.path} is a Delta table, which neither this Spark reads (its cluster lacks "
            f"Delta) nor Python: install the package deltalake{_files(path)}"
        ) from error
    try:
        table = deltalake.DeltaTable(path)
        if source.version is not None:
            table.load_as_version(source.version)
        key = ["delta", str(table.metadata().id), int(table.version())]
        name = digest(*map(str, key))
        files = kept.find(cache_dir, name)
        if files is None:
            rows = table.to_pyarrow_dataset().to_batches()
            files = kept.keep_rows(cache_dir, name, rows, work_dir)
    except Exception as error:
        # deltalake has many errors of its own, and passes on those of the file system.
        raise DataError(
            f"{source.path} cannot be read as a Delta table"
            f"{'' if source.version is None else f' at version {source.version}'}: "
            f"{causes.first_line(error)}{_files(path)}"
        ) from error
    return Table(key, files=tuple(files))


def _files(path: str) -> str:
    """What to do where an address has files instead of a Delta table."""
    why = addresses.refusal(path)
    return f". For files: {why}" if why else ""


def _ask(what: str, question: Callable[[], Any]) -> Any:
    """An answer of Spark's. What the user's own code raised on a worker is told instead of the
    names that Spark gives it."""
    try:
        return question()
    except Exception as error:
        # Analysis, permissions and reading fail with different classes in each version of Spark.
        cause = causes.of_worker(error)
        if cause is None:
            raise DataError(f"{what} cannot be read: {causes.first_line(error)}") from error
        raise DataError(f"{what} cannot be read: its query failed on a worker: {cause}") from None
