"""Preparing data on real executors: the same result however the work is cut, and whatever dies."""

from __future__ import annotations

import json
import os
import threading
import uuid
import venv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import storage
from dbx_llmtrain.driver import prepare as preparing
from dbx_llmtrain.driver import rows as rows_module
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo, PreparedData
from dbx_llmtrain.text.prepared import Split
from tests import tiny

ROWS = [
    {"prompt": f"question {i}", "completion": "the answer is " + "forty two " * (i % 7 + 1)}
    for i in range(300)
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelInfo:
    return resolve_model(ModelConfig(source=str(model_folder)), model_folder / "cache")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def config(model_folder: Path, folder: Path, **data: Any) -> llm.TrainConfig:
    settings = {"max_length": 96, "eval": 0.2, "cache_dir": str(folder / "cache")} | data
    return llm.TrainConfig(
        model={"source": str(model_folder)},
        data=settings,
        cluster={"local_dir": str(folder / "local")},
    )


def packs(data: PreparedData, name: str = "train") -> list[list[tuple[Any, ...]]]:
    """Everything that a step could see of a split: ids and marks of every example's documents."""
    split = Split(Path(data.artifact.source), name)
    return [
        [(tuple(ids.tolist()), tuple(marks.tolist())) for ids, marks in split.documents(example)]
        for example in range(len(split))
    ]


def content(data: PreparedData) -> Any:
    """What must not depend on how the work was cut."""
    return (
        data.audit,
        data.splits,
        data.end_tokens,
        {name: packs(data, name) for name in data.splits},
    )


def check_folder(data: PreparedData) -> None:
    """The folder has the files of its manifest and nothing else."""
    folder = Path(data.artifact.source)
    assert storage.read_manifest(folder) is not None
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {*(entry.path for entry in data.artifact.files), "manifest.json"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_result_does_not_depend_on_how_the_work_is_cut(
    spark: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    found = []
    for tasks, least in ((1, 10**9), (2, 1), (7, 1)):
        monkeypatch.setattr(rows_module, "_LEAST_BYTES", least)
        monkeypatch.setattr("dbx_llmtrain.driver.tasks._TASKS_A_SLOT", tasks)
        folder = tmp_path / f"cut-{tasks}"
        data = llm.prepare(config(model_folder, folder, train=str(file)), spark=spark)
        check_folder(data)
        found.append(data)
    parts = [len(list((Path(data.artifact.source) / "rows").iterdir())) for data in found]
    assert parts[0] == 1
    assert parts[0] < parts[1] < parts[2]
    assert content(found[0]) == content(found[1]) == content(found[2])
    assert len({data.artifact.fingerprint for data in found}) == 1
    check_frames(spark, model_folder, tmp_path, found[0])


def check_frames(spark: Any, model_folder: Path, tmp_path: Path, expected: PreparedData) -> None:
    """A DataFrame of the same rows gives the same, in any number of partitions."""
    frame = spark.createDataFrame(ROWS).select("prompt", "completion")
    for partitions in (1, 7):
        folder = tmp_path / f"frame-{partitions}"
        data = llm.prepare(
            config(model_folder, folder), data=frame.repartition(partitions), spark=spark
        )
        check_folder(data)
        assert content(data) == content(expected)
        again = llm.prepare(config(model_folder, folder), data=frame.repartition(3), spark=spark)
        assert again.artifact == data.artifact, "found again by its content"


@pytest.mark.timeout(300)
def test_c90_every_row_is_processed_once_on_the_whole_cluster(
    spark: Any, model_folder: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    seen = tmp_path / "seen"

    def formatter(row: dict[str, Any]) -> dict[str, Any]:
        with seen.open("a") as log:
            log.write(f"{os.getpid()} {row['prompt']}\n")
        return row

    cfg = config(model_folder, tmp_path, train=str(file), format="prompt_completion")
    data = llm.prepare(cfg, formatter=formatter, spark=spark)
    lines = seen.read_text().splitlines()
    assert len(lines) == len(ROWS) == data.audit.read_rows
    assert set(Counter(line.split(" ", 1)[1] for line in lines).values()) == {1}
    assert str(os.getpid()) not in {line.split()[0] for line in lines}, "not on the driver"


@pytest.mark.timeout(300)
def test_a_task_that_dies_is_tried_again_and_leaves_nothing(
    spark: Any, model_folder: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    marker = tmp_path / "died"

    def formatter(row: dict[str, Any]) -> dict[str, Any]:
        if row["prompt"] == "question 290" and not marker.exists():
            marker.touch()
            os._exit(17)
        return row

    cfg = config(model_folder, tmp_path, train=str(file), format="prompt_completion")
    data = llm.prepare(cfg, formatter=formatter, spark=spark)
    assert marker.exists()
    check_folder(data)
    assert data.audit.read_rows == len(ROWS)
    calm = config(model_folder, tmp_path / "calm", train=str(file))
    assert content(llm.prepare(calm, spark=spark)) == content(data)


@pytest.mark.timeout(300)
def test_bad_rows_of_all_tasks_come_as_one_error(
    spark: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_LEAST_BYTES", 1)
    lines = [json.dumps(row) for row in ROWS]
    lines[280], lines[100] = '{"prompt": "x"', '{"prompt": 1, "completion": "y"}'
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(llm.DataError) as caught:
        llm.prepare(config(model_folder, tmp_path, train=str(file)), spark=spark)
    text = str(caught.value).splitlines()
    assert text[0] == "2 rows cannot be used:"
    assert text[1] == f"  - {file}, line 101: column 'prompt': expected a string, found int '1'"
    assert text[2].startswith(f"  - {file}, line 281: expected a JSON object: ")
    assert text[3].startswith("Correct them, or leave them out: data.formatter names a function")
    assert len(text) == 4
    assert list((tmp_path / "cache" / "data").iterdir()) == []
    check_a_worker_that_cannot_work(spark, model_folder, tmp_path)


def check_a_worker_that_cannot_work(spark: Any, model_folder: Path, tmp_path: Path) -> None:
    """What fails on every attempt is told in one line, without Spark's stacks."""
    file = write(tmp_path / "good.jsonl", ROWS)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the local folder should be")
    cfg = config(model_folder, tmp_path, train=str(file)).override(f"cluster.local_dir={blocked}")
    with pytest.raises(llm.DataError, match=r"failed on a worker: .*StagingError: .*") as caught:
        llm.prepare(cfg, spark=spark)
    assert "\tat " not in str(caught.value)
    assert list((tmp_path / "cache" / "data").iterdir()) == []


@pytest.mark.timeout(300)
def test_tables_datasets_and_frames_that_change(
    spark: Any, model_folder: Path, tmp_path: Path
) -> None:
    import datasets
    from pyspark.sql import functions as F

    frame = spark.createDataFrame(ROWS).select("prompt", "completion")
    frame.write.mode("overwrite").saveAsTable("prepare_rows")
    table = llm.prepare(
        config(model_folder, tmp_path / "table", train="table:prepare_rows"), spark=spark
    )
    given = llm.prepare(
        config(model_folder, tmp_path / "dataset", eval=None),
        data={"train": datasets.Dataset.from_list(ROWS[:200]),
              "eval": {"a": datasets.Dataset.from_list(ROWS[200:250]), "b": frame.limit(20)}},
        spark=spark,
    )  # fmt: skip
    assert content(table)[0].read_rows == 300
    assert table.sources == {"train": "table:prepare_rows"}
    assert (given.audit.train_rows, given.audit.eval_rows) == (200, 70)
    assert sorted(given.splits) == ["eval-a", "eval-b", "train"]
    assert given.sources["eval-b"] == "the DataFrame given as eval-b"
    with pytest.raises(llm.DataError, match="there is no table no_such_table"):
        llm.prepare(config(model_folder, tmp_path, train="table:no_such_table"), spark=spark)
    source = {"path": "table:prepare_rows", "version": 3}
    with pytest.raises(llm.DataError, match="prepare_rows is no Delta table: version 3"):
        llm.prepare(config(model_folder, tmp_path, train=source), spark=spark)
    unstable = F.udf(lambda: uuid.uuid4().hex).asNondeterministic()
    random = frame.withColumn("completion", F.concat("completion", unstable()))
    changing = llm.prepare(config(model_folder, tmp_path / "x"), data=random, spark=spark)
    assert changing.audit.read_rows == 300, "its rows are kept until they are read"
    assert not spark._jsparkSession.sharedState().cacheManager().numCachedEntries()
    check_a_column_of_nulls(spark, model_folder, tmp_path)


def check_a_column_of_nulls(spark: Any, model_folder: Path, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(None,), (None,)], "text string")
    with pytest.raises(llm.DataError, match=r"of 2 rows none is left to train on .*2: empty text"):
        llm.prepare(config(model_folder, tmp_path, eval=None), data=frame, spark=spark)


@pytest.mark.timeout(300)
def test_two_drivers_at_once(
    spark: Any, model: ModelInfo, model_folder: Path, tmp_path: Path
) -> None:
    """Both succeed, whoever is first; what each returns is there and complete."""
    file = write(tmp_path / "rows.jsonl", ROWS)
    cfg = config(model_folder, tmp_path, train=str(file))
    found: dict[int, PreparedData] = {}

    def prepare(number: int, session: Any) -> Callable[[], None]:
        def run() -> None:
            found[number] = preparing.prepare_data(
                cfg, model, tmp_path / "cache", spark=session, progress=lambda rows: None
            )

        return run

    sessions = (spark, None)
    threads = [threading.Thread(target=prepare(i, one)) for i, one in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(found[0]) == content(found[1])
    for data in found.values():
        check_folder(data)


def order(data: PreparedData) -> list[tuple[int, ...]]:
    return [ids for example in packs(data) for ids, _ in example]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_order_of_a_frame_is_kept_and_known(
    spark: Any, model_folder: Path, tmp_path: Path
) -> None:
    """Without shuffling, the rows in another order are other data, however many partitions."""
    rows = [(i, row["prompt"], row["completion"]) for i, row in enumerate(ROWS)]
    frame = spark.createDataFrame(rows, "place int, prompt string, completion string")
    cfg = config(model_folder, tmp_path, eval=None, shuffle=False, packing=False)
    file = write(tmp_path / "rows.jsonl", ROWS)
    expected = order(llm.prepare(cfg.override(f"data.train={file}"), spark=spark))
    up = frame.repartitionByRange(24, "place").sortWithinPartitions("place").drop("place")
    down = frame.coalesce(1).sort("place", ascending=False).drop("place")
    first = llm.prepare(cfg, data=up, spark=spark)
    assert up.rdd.getNumPartitions() == 24
    assert len(list((Path(first.artifact.source) / "rows").iterdir())) < 24
    assert order(first) == expected
    second = llm.prepare(cfg, data=down, spark=spark)
    assert order(second) == expected[::-1]
    assert llm.prepare(cfg, data=up, spark=spark).artifact == first.artifact


@pytest.mark.timeout(300)
def test_many_small_partitions_are_read_by_few_tasks(
    spark: Any, model_folder: Path, tmp_path: Path
) -> None:
    frame = spark.createDataFrame(ROWS).select("prompt", "completion")
    data = llm.prepare(config(model_folder, tmp_path), data=frame.repartition(60), spark=spark)
    assert len(list((Path(data.artifact.source) / "rows").iterdir())) <= 12
    assert data.audit.read_rows == len(ROWS)


@pytest.mark.timeout(300)
def test_the_cause_of_a_failing_worker_is_told_alone(
    spark: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    broken = F.udf(lambda text: str(1 / (len(text) - len(text))))
    frame = spark.createDataFrame(ROWS).select("prompt", "completion")
    frame = frame.withColumn("completion", broken("prompt"))
    told = r"the DataFrame given as train cannot be read: .* ZeroDivisionError: division by zero"
    with pytest.raises(llm.DataError, match=told) as caught:
        llm.prepare(config(model_folder, tmp_path), data=frame, spark=spark)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    cfg = config(model_folder, tmp_path, train=str(write(tmp_path / "rows.jsonl", ROWS)))
    told = rf"failed on a worker: ModuleNotFoundError: .*Spark's workers run {python}, .*PYSPARK_PY"
    with pytest.raises(llm.DataError, match=told) as caught:
        llm.prepare(cfg, spark=spark)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
