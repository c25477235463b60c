"""Every source of a configuration, found: as files that tasks read, or as a table of Spark's.

A source that was passed as an object (``train(cfg, data=...)``) takes the place of the one that the
configuration has.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dbx_llmtrain import storage
from dbx_llmtrain.data_checks import TABLE
from dbx_llmtrain.driver import hub_data, kept, tables
from dbx_llmtrain.driver.rows import Unit, source_config, source_files, unit_rows
from dbx_llmtrain.errors import ConfigError, DataError, Problem
from dbx_llmtrain.sections import EVAL_NAME, DataConfig, SourceConfig
from dbx_llmtrain.text.readers import READERS, Fault, Located, Piece, exact_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

GIVEN = "data= (passed to the function)"
_ROLES = ("train", "eval", "test")
_FIRST_ROWS = 100


@dataclass(frozen=True)
class Input:
    """The rows of one source. ``role`` is the split they are for, ``told`` what the user calls
    them, ``key`` (JSON) what they are, ``table`` how Spark reads them where they are not files."""

    role: str
    told: str
    key: list[Any] = field(repr=False)
    files: tuple[Path, ...] = ()
    max_rows: int | None = None
    table: tables.Table | None = None
    weight: float = 1.0

    def first_rows(self) -> Iterator[Located]:
        """The first few rows that can be read, for a look at their columns. Raises ``DataError``
        where there is none."""
        count, fault = 0, ""
        for item in islice(self._read(), _FIRST_ROWS):
            if isinstance(item, Fault):
                fault = fault or exact_place(item.message)
            else:
                count += 1
                yield item
        if not count:
            raise DataError(fault or f"{self.told} has no rows")

    def _read(self) -> Iterator[Located | Fault]:
        if self.table is None:
            pieces = tuple(Piece(str(file)) for file in self.files)
            return unit_rows(Unit(pieces, self.max_rows))
        return tables.first_rows(self.table, self.told, _FIRST_ROWS)


@dataclass(frozen=True)
class Places:
    """Where sources are looked for and kept; ``in_order``: the order of their rows counts."""

    spark: SparkSession | None
    cache_dir: Path
    work_dir: Path | None = None
    only_on_driver: Callable[[Path], bool] = lambda path: False
    in_order: bool = False


def find_inputs(data: DataConfig, given: Any, places: Places) -> list[Input]:
    """Every source of training, evaluation and test rows, in that order.

    ``given`` is what was passed as ``data=``: a DataFrame or ``datasets.Dataset`` to train on, or a
    mapping of ``train``, ``eval`` and ``test`` to such. Raises ``ConfigError`` for what cannot be a
    source, ``DataError`` for one that is not there or cannot be read.
    """
    objects = check_given(data, given)
    found = []
    for role in _ROLES:
        configured = getattr(data, role)
        if role in objects:
            if configured is not None:
                logger.warning("%s replaces data.%s of the configuration", GIVEN, role)
            found += [_object(name, value, places) for name, value in _named(role, objects[role])]
        else:
            found += [_source(name, source, places) for name, source in _configured(data, role)]
    return found


def check_files(data: DataConfig, given: Any = None) -> None:
    """Raise ``DataError`` for data files that are not there: asked before a model is downloaded.

    Every fault is named by its field. Tables and data sets of the hub are looked for when they are
    read.
    """
    objects = check_given(data, given)
    problems = []
    for role in _ROLES:
        for name, source in _configured(data, role) if role not in objects else ():
            if _kind(source) != "files":
                continue
            try:
                source_files(source)
            except DataError as error:
                problems.append(Problem(f"data.{name.replace('-', '.', 1)}", str(error)))
    if problems:
        problems = list(dict.fromkeys(problems))
        raise DataError("\n".join(map(str, problems)), problems)


def _configured(data: DataConfig, role: str) -> list[tuple[str, SourceConfig]]:
    """A role's sources in the configuration, each with the split that it is for."""
    value = getattr(data, role)
    if isinstance(value, float | None):
        return []
    return [
        (name, source_config(source))
        for name, item in _named(role, value)
        for source in (item if isinstance(item, list) else [item])
    ]


def _named(role: str, value: Any) -> list[tuple[str, Any]]:
    """A role's value by split: evaluations may have names."""
    if isinstance(value, Mapping):
        return [(f"{role}-{name}", item) for name, item in value.items()]
    return [(role, value)]


def check_given(data: DataConfig, value: Any) -> dict[str, Any]:
    """What was passed as ``data=``, by role. Raises ``ConfigError`` for what cannot be a source,
    and where nothing says what to train on."""
    objects = dict(value) if isinstance(value, Mapping) else {"train": value}
    objects = {role: item for role, item in objects.items() if item is not None}
    problems = [
        Problem("data", f"data= has the key {name!r}: expected {', '.join(_ROLES)}")
        for name in objects
        if name not in _ROLES
    ]
    for role in _ROLES:
        items = _named(role, objects.get(role))
        if role != "eval" and isinstance(objects.get(role), Mapping):
            problems.append(Problem("data", f"data= has several {role} sources: only eval may"))
        problems += [
            Problem(
                f"data.{name.replace('-', '.', 1)}",
                "data= takes a Spark DataFrame or a datasets.Dataset, found "
                f"{type(item).__module__}.{type(item).__qualname__}{_advice(item)}",
            )
            for name, item in items
            if item is not None and not _is_frame(item) and not _is_dataset(item)
        ]
    named = objects.get("eval")
    problems += [
        Problem("data.eval", f"data= has the name {name!r}: expected letters, digits and _.-")
        for name in (named if isinstance(named, Mapping) else ())
        if not (isinstance(name, str) and re.match(EVAL_NAME, name))
    ]
    if data.train is None and "train" not in objects:
        problems.append(
            Problem("data.train", "missing: give a source, or pass the rows as data=...")
        )
    if problems:
        raise ConfigError(problems)
    return objects


def eval_names(data: DataConfig, given: Any = None) -> tuple[str, ...]:
    """The names of the sets that will be evaluated, empty of one without a name."""
    passed = given.get("eval") if isinstance(given, Mapping) else None
    value = data.eval if passed is None else passed
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, Mapping) else ("",)


def _advice(value: Any) -> str:
    module = type(value).__module__.partition(".")[0]
    if module == "pandas":
        return ": spark.createDataFrame(it) makes one"
    if module == "datasets":
        return ": a stream cannot be prepared, load it without streaming=True"
    return ": set data.train to a path" if isinstance(value, str | Path) else ""


def _is_frame(value: Any) -> bool:
    return type(value).__module__.startswith("pyspark.sql") and hasattr(value, "mapInArrow")


def _is_dataset(value: Any) -> bool:
    return type(value).__module__ == "datasets.arrow_dataset"


def _object(role: str, value: Any, places: Places) -> Input:
    if _is_frame(value):
        told = f"the DataFrame given as {role}"
        if places.spark is None:
            raise DataError(f"{told} needs a Spark session")
        table = tables.by_content(value, told, in_order=places.in_order)
        return Input(role, told, table.key, table=table)
    told = f"the Dataset given as {role}"
    key, files = hub_data.keep_dataset(value, places.cache_dir, places.work_dir)
    return Input(role, told, key, files=tuple(files))


def _source(role: str, source: SourceConfig, places: Places) -> Input:
    """Find what a source of the configuration stands for."""
    path, kind = source.path, _kind(source)
    if kind == "table":
        if places.spark is None:
            raise DataError(f"{path} needs a Spark session")
        name = path.removeprefix(TABLE)
        found = tables.catalog_table(places.spark, source, name, in_order=places.in_order)
        return _of_table(role, source, found)
    if kind == "delta":
        _refuse_hub_fields(role, source, "a Delta table")
        where = path if "://" in path else str(storage.local_path(path).absolute())
        table = tables.delta_folder(places.spark, source, where, places.cache_dir, places.work_dir)
        return _of_table(role, source, table)
    if kind == "hub":
        _refuse_version(role, source, "a data set of the hub")
        key, files = hub_data.fetch(source, places.cache_dir, places.work_dir)
        return _of_files(role, source, key, files)
    paths = source_files(source)
    _refuse_hub_fields(role, source, "a file or folder")
    _refuse_version(role, source, "a file or folder")
    files = kept.shared_files(paths, places.cache_dir, places.only_on_driver)
    states = [(str(file.absolute()), file.stat()) for file in paths]
    key = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in states]
    return _of_files(role, source, ["files", *key], files)


def _kind(source: SourceConfig) -> Literal["table", "delta", "hub", "files"]:
    """What a source of the configuration is, by the looks of its path."""
    if source.path.startswith(TABLE):
        return "table"
    local = storage.local_path(source.path)
    if "://" in source.path or (local / tables.DELTA_LOG).is_dir():
        return "delta"
    return "hub" if not local.exists() and _looks_like_hub(source) else "files"


def _of_table(role: str, source: SourceConfig, table: tables.Table) -> Input:
    if table.frame is None:
        return _of_files(role, source, table.key, list(table.files))
    key = [*table.key, source.max_rows]
    return Input(role, source.path, key, table=table, weight=source.weight)


def _of_files(role: str, source: SourceConfig, key: list[Any], files: list[Path]) -> Input:
    # Absolute: workers run in another folder than the driver.
    paths = tuple(file.absolute() for file in files)
    key = [*key, source.max_rows]
    return Input(role, source.path, key, paths, source.max_rows, weight=source.weight)


def _looks_like_hub(source: SourceConfig) -> bool:
    path = source.path
    named = any(value is not None for value in (source.name, source.split, source.revision))
    is_file = path.lower().endswith(tuple(READERS))
    return hub_data.HUB_ID.fullmatch(path) is not None and ("/" in path or named) and not is_file


def _refuse_hub_fields(role: str, source: SourceConfig, what: str) -> None:
    for name in ("name", "split", "revision"):
        if getattr(source, name) is not None:
            raise ConfigError(
                [
                    Problem(
                        f"data.{role.replace('-', '.', 1)}",
                        f"{name} is for data sets of the hub, {source.path} is {what}",
                    )
                ]
            )


def _refuse_version(role: str, source: SourceConfig, what: str) -> None:
    if source.version is not None:
        raise ConfigError(
            [
                Problem(
                    f"data.{role.replace('-', '.', 1)}",
                    f"version is for Delta tables, {source.path} is {what}",
                )
            ]
        )
