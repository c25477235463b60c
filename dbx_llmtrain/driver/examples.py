"""Examples of prepared data, read back for people to look at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import storage
from dbx_llmtrain.batches import DEFAULT_GLOBAL_BATCH
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver.rules import load_tokenizer
from dbx_llmtrain.errors import ConfigError, DataError, Problem
from dbx_llmtrain.preview_html import preview_page
from dbx_llmtrain.previewing import DocumentPreview, ExamplePreview, Preview
from dbx_llmtrain.records import ModelInfo, PreparedData
from dbx_llmtrain.text.pieces import PieceReader
from dbx_llmtrain.text.split import Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_HEAD, _TAIL = 800, 400
"""Tokens of a document that are shown, at its beginning and at its end."""
_DOCUMENTS = 12
"""Documents of an example that are shown."""


def require(cfg: TrainConfig, count: object, split: object, data: Any) -> None:
    """Raise ``ConfigError`` for a number of examples that cannot be shown, and for a split that the
    data cannot have: asked before anything is started."""
    problems = []
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        problems.append(Problem("n", f"expected a whole number of at least 1, found {count!r}"))
    role = str(split).partition("-")[0]
    if role not in ("train", "eval", "test"):
        expected = "expected train, eval, eval-NAME or test"
        problems.append(Problem("split", f"{expected}, found {split!r}"))
    elif role != "train" and getattr(cfg.data, role) is None and not isinstance(data, Mapping):
        problems.append(
            Problem("split", f"{split} has no rows: set data.{role}, or pass rows as {role}")
        )
    if problems:
        raise ConfigError(problems)


def show_examples(
    cfg: TrainConfig, model: ModelInfo, data: PreparedData, *, count: int, split: str
) -> Preview:
    """The first ``count`` examples of a split, in the order in which training takes them.

    The page of it is kept in the folder of the prepared data. Raises ``ConfigError`` for a split
    that the data does not have, ``DataError`` for prepared files that are damaged.
    """
    if split not in data.splits:
        there = ", ".join(data.splits)
        raise ConfigError(
            [Problem("split", f"expected one that the data has ({there}), found {split!r}")]
        )
    rows = _open(Path(data.artifact.source), split)
    ends = frozenset(data.end_tokens)
    numbers = _order(cfg, rows, split)[:count]
    trusted = cfg.model.trust_remote_code
    with private_modules(None, wanted=trusted):
        reader = PieceReader(load_tokenizer(model, trusted=trusted))
        examples = [_example(rows, int(number), reader, ends) for number in numbers]
    preview = Preview(
        model=model.source,
        split=split,
        objective=cfg.data.objective,
        mlm_probability=cfg.data.mlm_probability,
        max_length=cfg.data.max_length,
        format=data.format,
        sources=data.sources,
        folder=data.artifact.source,
        count=len(rows),
        examples=tuple(examples),
        audit=data.audit,
        info=data.splits[split],
        packs={name: info.examples for name, info in data.splits.items()},
    )
    return _keep(preview)


def _open(folder: Path, split: str) -> Split:
    import pyarrow as pa

    try:
        return Split(folder, split)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(
            f"the prepared data in {folder} is damaged ({error}): delete the folder, and the data "
            "is prepared anew"
        ) from error


def _order(cfg: TrainConfig, rows: Split, split: str) -> NDArray[np.int64]:
    """The order of the first epoch; evaluation takes the examples as they are stored."""
    from dbx_llmtrain.worker.order import Arrangement

    data, seed = cfg.data, cfg.train.seed
    arrangement = Arrangement(seed, data.shuffle, data.group_by_length, data.longest_first)
    if split != "train":
        arrangement = Arrangement(seed, shuffle=False)
    return arrangement.epoch(0, rows.tokens, cfg.train.global_batch_size or DEFAULT_GLOBAL_BATCH)


def _example(rows: Split, number: int, reader: PieceReader, ends: frozenset[int]) -> ExamplePreview:
    places = rows.numbers(number)
    trained_ends = sum(_count_ends(*rows.document(place), ends) for place in places)
    return ExamplePreview(
        number=number,
        tokens=int(rows.tokens[number]),
        trained=int(rows.trained[number]),
        trained_ends=trained_ends,
        documents=tuple(_document(rows, place, reader, ends) for place in places[:_DOCUMENTS]),
        hidden=max(0, len(places) - _DOCUMENTS),
    )


def _document(
    rows: Split, place: int, reader: PieceReader, ends: frozenset[int]
) -> DocumentPreview:
    ids, marks = rows.document(place)
    row, start = rows.source(place)
    whole = len(ids) <= _HEAD + _TAIL
    head = len(ids) if whole else _HEAD
    tail = len(ids) if whole else len(ids) - _TAIL
    numbers, trained = ids.tolist(), marks.tolist()
    return DocumentPreview(
        row=row,
        start=start,
        tokens=len(ids),
        trained=int(marks.sum()),
        trained_ends=_count_ends(ids, marks, ends),
        pieces=tuple(reader.read(numbers[:head], trained[:head])),
        hidden=tail - head,
        tail=tuple(reader.read(numbers[tail:], trained[tail:])),
    )


def _count_ends(ids: NDArray[np.int32], marks: NDArray[np.bool_], ends: frozenset[int]) -> int:
    return sum(token in ends for token in ids[marks].tolist())


def _keep(preview: Preview) -> Preview:
    """Write the page beside the prepared data. What may only be read can be looked at all the
    same."""
    name = "preview.html" if preview.split == "train" else f"preview-{preview.split}.html"
    page = Path(preview.folder) / name
    kept = preview.model_copy(update={"page": str(page)})
    try:
        storage.write_text(page, preview_page(kept))
    except OSError as error:
        return preview.model_copy(update={"problem": f"{page}: {error.strerror or error}"})
    return kept
