"""One task of preparing data: rows in, a part file of a prepared data set out.

Runs in Spark's Python workers, or on the driver's machine. A task writes to its node's own disk,
copies the finished files to shared storage under names that no other attempt has, and returns what
became of every row. Only files that a successful task has named count.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.errors import ConfigError, DataError
from dbx_llmtrain.text.encode import Encoder, Outcome, Rules
from dbx_llmtrain.text.prepared import Example, PartWriter
from dbx_llmtrain.text.readers import Fault, Located, Piece, exact_place, read_piece
from dbx_llmtrain.worker import node
from dbx_llmtrain.worker.staged import using

FAULTS_SHOWN = 10
NOT_SAMPLED = "not sampled (data.train weight)"
_EMPTY = "no example in it"
CONTENT = "__dbx_llmtrain_content"
"""Column of a DataFrame's rows: a hash of their content, added up to see whether it changes."""
PLACE = "__dbx_llmtrain_place"
"""Column of a DataFrame's rows where their order counts: it grows from row to row."""
_ROWS_AT_ONCE = 256
_TASK_BITS, _ROW_BITS = 20, 32
"""The order of a row: its source, the task's number in it, the row's number in the task."""
_DAY = 24 * 3600


@dataclass(frozen=True)
class Source:
    """Where rows go and what they are: JSON both ways.

    ``role`` is the split of all rows (``eval``, ``test``, ...); of ``train`` the shares go to the
    splits ``eval`` and ``test``, and rows are taken ``weight`` times. ``name`` is how a table or
    DataFrame is called in messages.
    """

    role: str
    rules: dict[str, Any]
    weight: float = 1.0
    eval_share: float = 0.0
    test_share: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class Job:
    """What all tasks of one preparation have in common. ``tokenizer`` has the fields of an
    ``Artifact``, ``trusted`` says whether its own code runs; ``threads`` 0 leaves the tokenizer's
    threads as they are."""

    folder: str
    tokenizer: dict[str, Any]
    sources: tuple[Source, ...]
    local_dir: str | None = None
    formatter: bytes | None = None
    threads: int = 0
    trusted: bool = False


@dataclass(frozen=True)
class Task:
    """The rows that one task reads from files. ``number`` is its place in its source."""

    number: int
    source: int
    pieces: tuple[Piece, ...] = ()
    limit: int | None = None


@dataclass
class Tally:
    """What became of the rows of one task; plain data, JSON both ways.

    Rows count as often as an epoch has them, in ``counted`` too; ``read`` counts them once.
    ``rows``, ``truncated`` and ``dropped_tokens`` (of examples that were left out) are by split.
    ``lengths``: training examples by the bits of their number of tokens. ``faults``: order and
    message of the first of ``faulty`` rows that cannot be right; ``stopped``: there may be more.
    ``keys``: up to two content ids of rows that are split by share, which is enough to know that
    they differ.
    """

    number: int
    source: int
    rows: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_examples: dict[str, int] = field(default_factory=dict)
    examples: int = 0
    truncated: dict[str, int] = field(default_factory=dict)
    dropped_tokens: dict[str, int] = field(default_factory=dict)
    read: int = 0
    counted: int = 0
    ends: int = 0
    end_tokens: list[int] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    faulty: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list)
    stopped: bool = False
    keys: list[str] = field(default_factory=list)
    content: int = 0
    part: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def files_task(
    job: dict[str, Any], task: dict[str, Any], progress: Callable[[int], None]
) -> dict[str, Any]:
    """Encode the rows of a task's files. Fields of a ``Job`` and a ``Task`` in, those of a
    ``Tally`` out; ``progress`` gets the number of rows that were read since its last call."""
    pieces = tuple(Piece(**piece) for piece in task["pieces"])
    rows = (row for piece in pieces for row in read_piece(piece))
    what = Task(**{**task, "pieces": pieces})
    return _run(_job(job), what, islice(rows, what.limit), progress)


def table_task(
    job: dict[str, Any],
    source: int,
    partition: int,
    batches: Iterable[Any],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Encode the rows of Arrow record batches: one partition of a table or DataFrame."""
    content = [0]
    whole = _job(job)
    rows = _batch_rows(whole.sources[source].name, partition, batches, content)
    return _run(whole, Task(partition, source), rows, progress) | {"content": content[0]}


def _job(fields: dict[str, Any]) -> Job:
    return Job(**{**fields, "sources": tuple(Source(**item) for item in fields["sources"])})


def _batch_rows(
    name: str, partition: int, batches: Iterable[Any], content: list[int]
) -> Iterator[Located]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            content[0] = (content[0] + row.pop(CONTENT, 0)) % 2**64
            yield row, f"{name}, partition {partition}, row {number}"


def _run(
    job: Job, task: Task, rows: Iterator[Located | Fault], progress: Callable[[int], None]
) -> dict[str, Any]:
    """Whatever the rows or the settings are to blame for is returned, not raised: only what may go
    well elsewhere is worth another attempt."""
    tally = Tally(task.number, task.source)
    try:
        with (
            _parts_folder(job.local_dir) as folder,
            private_modules(Path(folder), wanted=job.trusted),
            using([job.tokenizer], job.local_dir) as (tokenizer,),
        ):
            encoder = _encoder(job, task.source, tokenizer)
            _write(job, task, encoder, rows, tally, folder, progress)
    except (ConfigError, DataError) as error:
        tally.error = str(error)
    return asdict(tally)


def _parts_folder(local_dir: str | None) -> tempfile.TemporaryDirectory[str]:
    root = node.local_dir(local_dir) / "parts"
    root.mkdir(exist_ok=True)
    for left in root.iterdir():  # by attempts that were killed
        with node.Capture():
            if time.time() - left.stat().st_mtime > _DAY:
                storage.remove(left)
    return tempfile.TemporaryDirectory(prefix="part-", dir=root)


def _encoder(job: Job, source: int, tokenizer: Path) -> Encoder:
    if job.threads:
        # Read by the tokenizers library when it starts its threads, once in a process.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if job.threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    formatter = pickle.loads(job.formatter) if job.formatter else None
    rules = Rules(**job.sources[source].rules)
    # Code may import more of itself later: a tokenizer with code does not outlive its modules.
    load = load_tokenizer if job.trusted else _kept_tokenizer
    return Encoder(load(tokenizer, trusted=job.trusted), rules, formatter=formatter)


def load_tokenizer(folder: Path, *, trusted: bool) -> Any:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(**load_from(folder, trusted=trusted))


_kept_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
"""A worker process runs one task after the other."""


def _write(
    job: Job,
    task: Task,
    encoder: Encoder,
    rows: Iterator[Located | Fault],
    tally: Tally,
    folder: str,
    progress: Callable[[int], None],
) -> None:
    """Write the part of the task and, where it has rows, publish it."""
    part = f"{task.source:04d}-{task.number:08d}-{uuid.uuid4().hex[:12]}.arrow"
    local = Path(folder)
    with PartWriter(local / "rows", local / "index") as writer, _few_collections():
        for block in _blocks(rows):
            _write_block(job.sources[task.source], encoder, block, tally, writer)
            progress(len(block))
            if len(tally.faults) >= FAULTS_SHOWN:
                tally.stopped = True
                break
    tally.faulty = len(tally.faults)
    tally.faults = [(order, exact_place(text)) for order, text in tally.faults[:FAULTS_SHOWN]]
    if not tally.examples or tally.faults:
        return
    tally.part = part
    for name in ("rows", "index"):
        target = Path(job.folder, name, part)
        digest = storage.copy_file(local / name, target)
        size = (local / name).stat().st_size
        tally.files.append({"path": f"{name}/{part}", "size": size, "sha256": digest})


@contextmanager
def _few_collections() -> Iterator[None]:
    """What was made before the rows (libraries, the tokenizer) stays, so that Python's collector
    need not look through it again for every few rows: a sixth of the time."""
    if gc.get_freeze_count():  # somebody else's doing, which must not be undone
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _blocks(rows: Iterator[Located | Fault]) -> Iterator[list[Located | Fault]]:
    while block := list(islice(rows, _ROWS_AT_ONCE)):
        yield block


def _write_block(
    source: Source,
    encoder: Encoder,
    block: list[Located | Fault],
    tally: Tally,
    writer: PartWriter,
) -> None:
    good = [item for item in block if not isinstance(item, Fault)]
    outcomes = iter(encoder.encode([row for row, _ in good], [where for _, where in good]))
    for item in block:
        order = (((tally.source << _TASK_BITS) + tally.number) << _ROW_BITS) + tally.read
        tally.read += 1
        if isinstance(item, Fault):
            tally.faults.append((order, item.message))
            continue
        outcome = next(outcomes)
        if outcome.fault is not None:
            tally.faults.append((order, outcome.fault))
        else:
            _write_row(source, outcome, order, tally, writer)


def _write_row(
    source: Source, outcome: Outcome, order: int, tally: Tally, writer: PartWriter
) -> None:
    """Send a row to its split, count it, write its examples."""
    copies = copies_of(outcome.key, source.weight)
    split = split_of(outcome.key, source)
    times = copies if split == "train" else 1
    tally.counted += max(times, 1)
    if not copies or not outcome.examples:
        reason = NOT_SAMPLED
        if not outcome.examples:
            reason = of_split(next(iter(outcome.dropped), _EMPTY), split)
            _count(tally.dropped_tokens, split, max(times, 1) * outcome.dropped_tokens)
        _count(tally.dropped, reason, max(times, 1))
        return
    if source.eval_share + source.test_share and len(tally.keys) < 2:
        tally.keys = sorted({*tally.keys, outcome.key})
    _count(tally.rows, split, times)
    for reason in outcome.dropped:
        _count(tally.dropped_examples, of_split(reason, split), times)
    _count(tally.dropped_tokens, split, times * outcome.dropped_tokens)
    _count(tally.truncated, split, times * outcome.truncated)
    for example in outcome.examples:
        writer.write(example, key=outcome.key, order=order, split=split, copies=times)
        tally.examples += times
        tally.end_tokens = sorted({*tally.end_tokens, *_end_tokens(example)})
        if split == "train":
            tally.ends += times * len(example.ends)
            _count(tally.lengths, str(len(example.input_ids).bit_length() - 1), times)


def _end_tokens(example: Example) -> Iterable[int]:
    return {int(example.input_ids[place]) for place in example.ends}


def _count(counts: dict[str, int], name: str, times: int) -> None:
    if times:
        counts[name] = counts.get(name, 0) + times


def of_split(reason: str, split: str) -> str:
    """A reason that says whose rows it is about, where they are not for training."""
    return reason if split == "train" else f"{reason} ({split})"


def position(key: str) -> float:
    """Where a row's content id lies in [0, 1): the same for the same content, evenly spread."""
    return int(key[:13], 16) / 16**13


def split_of(key: str, source: Source) -> str:
    """The split of a row with this content id."""
    if source.role != "train":
        return source.role
    place = position(key)
    if place < source.eval_share:
        return "eval"
    return "test" if place < source.eval_share + source.test_share else "train"


def copies_of(key: str, weight: float) -> int:
    """How often a row is taken by a source's weight: its whole part, and once more for the share of
    the rows that the fraction says. Independent of ``split_of``: a hash of its own."""
    whole = int(weight)
    if weight == whole:
        return whole
    again = hashlib.sha256(f"weight {key}".encode()).hexdigest()
    return whole + (position(again) < weight - whole)


def merge(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name, the biggest first."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
