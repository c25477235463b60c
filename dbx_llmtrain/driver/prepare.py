"""The prepared data set: rows read, split, tokenised and packed once, by Spark's workers.

It is kept in ``<cache>/data/<fingerprint>-<attempt>`` on shared storage and used again while
nothing that it depends on has changed. Every attempt has a folder of its own, complete when its
manifest is there: drivers that prepare the same at once do not disturb each other.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver import counts, fingerprints, formatters, rules, tasks
from dbx_llmtrain.driver.inputs import Input, Places, find_inputs
from dbx_llmtrain.driver.rows import make_units
from dbx_llmtrain.driver.sources import only_on_driver
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.records import Artifact, FileEntry, ModelInfo, PreparedData
from dbx_llmtrain.sections import DataConfig
from dbx_llmtrain.text.prepared import PackRules, SplitStats, rows_in_train, write_packs
from dbx_llmtrain.worker import part

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[int], None]
"""Called with the number of rows read so far."""

_DAY = 24 * 3600
_MAGIC = b"ARROW1"
"""What a whole Arrow file begins and ends with."""


def prepare_data(
    cfg: TrainConfig,
    model: ModelInfo,
    cache_dir: Path,
    *,
    spark: SparkSession | None = None,
    data: Any = None,
    formatter: formatters.Formatter | None = None,
    progress: Progress = lambda rows: None,
    work_dir: Path | None = None,
) -> PreparedData:
    """Read, split, tokenise and pack the data of ``cfg`` for ``model``; reuse what is there.

    ``cache_dir`` is on storage that every node sees, ``work_dir`` a folder on the driver's own disk
    (default: the temporary folder). Without ``spark`` all is done in this process, which can read
    files only. ``data`` takes the place of the configuration's sources, ``formatter`` that of
    ``data.formatter``; ``progress`` gets the number of rows read so far. Raises
    ``DataError`` for rows that cannot be used, when nothing is left and for prepared files that are
    damaged, ``ConfigError`` for a tokenizer that does not fit the model or the data.
    """
    places = Places(
        spark,
        cache_dir,
        work_dir,
        lambda path: only_on_driver(path, cache_dir),
        in_order=not cfg.data.shuffle,
    )
    function = formatters.choose(cfg.data.formatter, formatter)
    with _open(cfg.data, data, places) as found:
        name = fingerprints.of_data(cfg.data, model, found, function)
        known = _reuse(cache_dir, name)
        if known is not None:
            return known
        folder = cache_dir / "data" / f"{name}-{uuid.uuid4().hex[:8]}"
        with private_modules(work_dir, wanted=cfg.model.trust_remote_code):
            try:
                return _prepare(cfg, model, found, function, folder, spark, progress, work_dir)
            except BaseException:
                storage.remove(folder)
                raise


@contextmanager
def _open(data: DataConfig, given: Any, places: Places) -> Iterator[list[Input]]:
    """The sources; what Spark keeps of them is let go at the end."""
    found = find_inputs(data, given, places)
    try:
        yield found
    finally:
        for item in found:
            if item.table is not None:
                item.table.close()


def _prepare(
    cfg: TrainConfig,
    model: ModelInfo,
    found: Sequence[Input],
    function: formatters.Formatter | None,
    folder: Path,
    spark: SparkSession | None,
    report: Progress,
    work_dir: Path | None,
) -> PreparedData:
    """Run the tasks, pack what they have written, and declare the folder complete."""
    trusted = cfg.model.trust_remote_code
    tokenizer = rules.load_tokenizer(model, trusted=trusted)
    chosen = rules.choose(cfg.data, model, found, function, tokenizer)
    slots = tasks.find_slots(spark)
    job = part.Job(
        folder=str(folder),
        tokenizer=fingerprints.tokenizer(model).model_dump(mode="json"),
        sources=tuple(
            _source(cfg.data, item, found, rule) for item, rule in zip(found, chosen, strict=True)
        ),
        local_dir=cfg.cluster.local_dir,
        formatter=formatters.pickled(function) if function is not None else None,
        threads=slots.threads,
        trusted=trusted,
    )
    tallies = _run(cfg.data, found, job, spark, slots, report)
    counts.check(tallies, found, counts.wanted_splits(cfg.data, found))
    packs, in_train, files = _pack(cfg.data, tallies, folder, work_dir)
    record = PreparedData(
        artifact=_artifact(folder, files),
        audit=counts.audit(tallies, packs, cfg.data.max_length),
        format=", ".join(dict.fromkeys(rule.format for rule in chosen)),
        splits=counts.splits(tallies, packs, in_train),
        sources=_told(found),
        end_tokens=tuple(sorted({token for tally in tallies for token in tally.end_tokens})),
        chat_template=next((rule.chat_template for rule in chosen), None),
    )
    return _commit(folder, record)


def _source(data: DataConfig, item: Input, found: Sequence[Input], rule: Any) -> part.Source:
    training = item.role == "train"
    return part.Source(
        role=item.role,
        rules=asdict(rule),
        weight=item.weight,
        eval_share=counts.share(data, "eval", found) if training else 0.0,
        test_share=counts.share(data, "test", found) if training else 0.0,
        name=item.told,
    )


def _run(
    data: DataConfig,
    found: Sequence[Input],
    job: part.Job,
    spark: SparkSession | None,
    slots: tasks.Slots,
    report: Progress,
) -> list[part.Tally]:
    """The tallies of all tasks, in the order of the sources."""
    todo = [
        part.Task(number, source, unit.pieces, unit.limit)
        for source, item in enumerate(found)
        if item.table is None
        for number, unit in enumerate(
            make_units(item.files, item.max_rows, tasks.task_count(slots))
        )
    ]
    frames = [
        tasks.Frame(source, item.table.frame, item.table.rows, placed=item.table.placed)
        for source, item in enumerate(found)
        if item.table is not None
    ]
    if spark is None:
        results = list(tasks.run_here(job, todo, report))
    else:
        in_order = not data.shuffle
        results = tasks.run_on_spark(spark, job, todo, frames, slots, report, in_order=in_order)
    tallies = [part.Tally(**result) for result in results]
    return sorted(tallies, key=lambda tally: (tally.source, tally.number))


def _pack(
    data: DataConfig, tallies: Sequence[part.Tally], folder: Path, work_dir: Path | None
) -> tuple[dict[str, SplitStats], dict[str, int], list[FileEntry]]:
    """Write the packs of every split from the index files; statistics by split, held-out rows that
    are training rows too, and the entries of all files that count. Whatever other attempts of tasks
    have left is removed."""
    how = PackRules(
        max_length=data.max_length,
        packing=("best_fit" if data.packing else "none")
        if isinstance(data.packing, bool)
        else data.packing,
        split_long=data.overflow == "split",
        in_order=not data.shuffle,
    )
    parts = sorted(tally.part for tally in tallies if tally.part)
    files = [
        FileEntry.model_validate(entry)
        for tally in tallies
        for entry in tally.files
        if entry["path"].startswith("rows/")
    ]
    names = {name for tally in tallies for name in tally.rows}
    packs = {}
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-", dir=work_dir) as temporary:
        local = Path(temporary)
        index = [folder / "index" / name for name in parts]
        for split in sorted(names, key=lambda name: (name != "train", name)):
            packs[split] = write_packs(local, index, split, how)
        files += storage.publish_folder(local, folder)
    in_train = rows_in_train(index) if len(names) > 1 else {}
    storage.remove(folder / "index")
    for path in (folder / "rows").iterdir():
        if path.name not in parts:
            path.unlink()
    return packs, in_train, files


def _commit(folder: Path, record: PreparedData) -> PreparedData:
    """Write the manifest, unless another driver was first: then its data set is used."""
    name = record.artifact.fingerprint
    other = _reuse(folder.parent.parent, name)
    if other is not None:
        storage.remove(folder)
        return other
    content = record.model_dump(mode="json", exclude={"artifact"})
    files = [entry.model_dump() for entry in record.artifact.files]
    storage.write_manifest(folder, {"files": files, "prepared": content})
    _remove_abandoned(folder.parent, name)
    return record


def _reuse(cache_dir: Path, name: str) -> PreparedData | None:
    """A complete data set of this fingerprint."""
    for folder in sorted((cache_dir / "data").glob(f"{name}-*")):
        manifest: Any = storage.read_manifest(folder)
        if manifest is None:
            continue
        files = [FileEntry.model_validate(entry) for entry in manifest["files"]]
        found = None
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found = PreparedData(artifact=_artifact(folder, files), **manifest["prepared"])
        if found is not None:
            _check_files(folder, files)
            return found
    return None


def _check_files(folder: Path, files: Sequence[FileEntry]) -> None:
    """Raise ``DataError`` for a file that is not whole, as far as its ends tell; the nodes compare
    the hashes of what they copy."""
    for entry in files:
        path = folder / entry.path
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
            file.seek(-len(_MAGIC), os.SEEK_END)
            whole = begin == file.read() == _MAGIC
        if not whole:
            raise DataError(
                f"{path}, a file of the prepared data, is damaged (it does not begin and end as an "
                f"Arrow file does): delete the folder {folder}, and the data is prepared anew"
            )


def _remove_abandoned(parent: Path, name: str) -> None:
    """Folders that a killed driver has left."""
    for folder in parent.glob(f"{name}-*"):
        with contextlib.suppress(OSError):
            old = time.time() - folder.stat().st_mtime > _DAY
            if old and storage.read_manifest(folder) is None:
                storage.remove(folder)


def _artifact(folder: Path, files: Sequence[FileEntry]) -> Artifact:
    name = folder.name.partition("-")[0]
    return Artifact(kind="data", source=str(folder), fingerprint=name, files=tuple(files))


def _told(found: Sequence[Input]) -> dict[str, str]:
    """Role to its sources, as the user calls them."""
    told: dict[str, list[str]] = {}
    for item in found:
        weight = "" if item.weight == 1 else f" x {item.weight:g}"
        told.setdefault(item.role, []).append(f"{item.told}{weight}")
    return {role: ", ".join(names) for role, names in told.items()}
