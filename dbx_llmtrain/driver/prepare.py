"""The prepared data set: rows read, split, tokenised and packed once, on the driver.

It is kept in ``<cache>/data/<fingerprint>`` on shared storage and reused while nothing that it
depends on has changed.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.driver.model_files import digest, refuse
from dbx_llmtrain.driver.rows import Located, read_rows, source_config, source_files
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.records import Artifact, Audit, FileEntry, ModelInfo, PreparedData
from dbx_llmtrain.sections import DataConfig, SourceConfig
from dbx_llmtrain.text.chat import Encoded, Encoder
from dbx_llmtrain.text.formats import Dropped, Format, detect_format, parse_row
from dbx_llmtrain.text.prepared import Example, SplitStats, write_split

Progress = Callable[[int], None]
"""Called with the number of rows read so far."""

_RECIPE = 1  # part of the fingerprint: raise it when the same rows give other tokens or packs
_FAULTS_SHOWN = 10
_BAR_AFTER = 3.0  # seconds


def prepare_data(
    cfg: TrainConfig,
    model: ModelInfo,
    cache_dir: Path,
    *,
    progress: Progress | None = None,
    work_dir: Path | None = None,
) -> PreparedData:
    """Read, split, tokenise and pack the data of ``cfg`` for ``model``; reuse what is there.

    ``cache_dir`` is on storage that every node sees, ``work_dir`` a folder on the driver's own disk
    (default: the temporary folder). Without ``progress`` a bar is shown after a few seconds. Raises
    ``DataError`` for rows that cannot be used and when nothing is left, ``ConfigError`` for a
    tokenizer that does not fit the model or the data.
    """
    name = _fingerprint(cfg.data, model)
    target = cache_dir / "data" / name
    known = _reuse(target)
    if known is not None:
        return known
    with private_modules(work_dir, wanted=cfg.model.trust_remote_code):
        return _make(cfg, model, target, progress=progress, work_dir=work_dir)


def _make(
    cfg: TrainConfig,
    model: ModelInfo,
    target: Path,
    *,
    progress: Progress | None,
    work_dir: Path | None,
) -> PreparedData:
    tokenizer = _load_tokenizer(model, trusted=cfg.model.trust_remote_code)
    _check_vocabulary(tokenizer, model)
    encoder = Encoder(
        tokenizer,
        train_on=cfg.data.train_on,
        max_length=cfg.data.max_length,
        overflow=cfg.data.overflow,
    )
    tally = _Tally(progress=progress)
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-", dir=work_dir) as temporary:
        folder = Path(temporary) / "data"
        train, held_out = _write(cfg.data, encoder, tally, folder)
        storage.remove(target)
        files = storage.publish_folder(folder, target)
    record = _record(cfg.data, tally, train, held_out, _artifact(target, files))
    content = record.model_dump(mode="json", exclude={"artifact"})
    storage.write_manifest(
        target, {"files": [entry.model_dump() for entry in files], "prepared": content}
    )
    return record


@dataclass
class _Tally:
    """What became of every row so far."""

    progress: Progress | None
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    train_ends: int = 0
    end_tokens: set[int] = field(default_factory=set)
    format: Format | None = None
    keys: set[str] = field(default_factory=set)
    """Content ids of rows to split by share; two are enough to know that they differ."""
    faults: list[str] = field(default_factory=list)

    def fault(self, error: DataError) -> None:
        """Keep a bad row for the error that tells of all; give up when there are many."""
        self.faults.append(str(error))
        if len(self.faults) >= _FAULTS_SHOWN:
            raise DataError(
                f"{len(self.faults)} rows cannot be used (reading stopped there):\n"
                + self.fault_lines()
            )

    def fault_lines(self) -> str:
        return "\n".join(f"  - {fault}" for fault in self.faults)

    def train_row(self, row: Encoded) -> Example:
        """Count a row that is trained on."""
        self.truncated += row.truncated
        self.train_ends += len(row.end_tokens)
        self.end_tokens.update(row.end_tokens)
        return row.example


def _write(
    data: DataConfig, encoder: Encoder, tally: _Tally, folder: Path
) -> tuple[SplitStats, SplitStats | None]:
    """Write both splits below ``folder``."""
    share = data.eval if isinstance(data.eval, float) else 0.0
    held_out: list[Example] = []

    def train_rows() -> Iterator[Example]:
        for row in _encode(data.train, data, encoder, tally):
            if _is_held_out(row.example.key, share, tally):
                held_out.append(row.example)
            else:
                yield tally.train_row(row)

    def save(name: str, rows: Iterable[Example]) -> SplitStats:
        return write_split(folder / name, rows, max_length=data.max_length, packing=data.packing)

    train = save("train", train_rows())
    if not isinstance(data.eval, float | None):
        held_out = [row.example for row in _encode(data.eval, data, encoder, tally)]
    if tally.faults:
        rows = "1 row" if len(tally.faults) == 1 else f"{len(tally.faults)} rows"
        raise DataError(f"{rows} cannot be used:\n{tally.fault_lines()}")
    if not train.rows:
        raise _nothing_left("to train on", tally)
    if data.eval is None:
        return train, None
    if not held_out:
        raise _nothing_left("to evaluate on: give data.eval a larger share or a file", tally)
    return train, save("eval", held_out)


def _encode(
    source: str | SourceConfig, data: DataConfig, encoder: Encoder, tally: _Tally
) -> Iterator[Encoded]:
    """The rows of a source that can be used; the others are counted in ``tally``."""
    fmt = data.format if data.format != "auto" else None
    for row, where in _watched(read_rows(source), tally):
        tally.read += 1
        if fmt is None:
            fmt = detect_format(row, data.columns, where)
        if tally.format is None:
            tally.format = fmt
        encoder.check_format(fmt)
        try:
            parsed = parse_row(row, fmt, data.columns, where)
            encoded = parsed if isinstance(parsed, Dropped) else encoder.encode(parsed, where)
        except DataError as error:
            tally.fault(error)
            continue
        if isinstance(encoded, Dropped):
            tally.dropped[encoded.reason] += 1
        else:
            yield encoded


def _watched(rows: Iterator[Located], tally: _Tally) -> Iterator[Located]:
    if tally.progress is None:
        from tqdm import tqdm

        yield from tqdm(rows, desc="tokenising", unit=" rows", delay=_BAR_AFTER, mininterval=1.0)
        return
    for row in rows:
        yield row
        tally.progress(tally.read)


def _is_held_out(key: str, share: float, tally: _Tally) -> bool:
    if share and len(tally.keys) < 2:
        tally.keys.add(key)
    return _position(key) < share


def _position(key: str) -> float:
    """Where a row's content id lies in [0, 1): the same for the same content, evenly spread."""
    return int(key[:13], 16) / 16**13


def _nothing_left(what: str, tally: _Tally) -> DataError:
    reasons = ", ".join(f"{count}: {reason}" for reason, count in tally.dropped.most_common())
    same = "; all rows are equal, and equal rows are never parted" if len(tally.keys) == 1 else ""
    return DataError(
        f"of {tally.read} rows none is left {what} (rows dropped: {reasons or 'none'}{same})"
    )


def _record(
    data: DataConfig,
    tally: _Tally,
    train: SplitStats,
    held_out: SplitStats | None,
    artifact: Artifact,
) -> PreparedData:
    audit = Audit(
        read_rows=tally.read,
        train_rows=train.rows,
        eval_rows=held_out.rows if held_out else 0,
        dropped=dict(tally.dropped),
        truncated_rows=tally.truncated,
        tokens=train.tokens,
        trained_tokens=train.trained,
        trained_end_tokens=tally.train_ends,
        packs=train.examples,
        packing_efficiency=train.tokens / (train.examples * data.max_length),
    )
    sources = {"train": source_config(data.train).path}
    if not isinstance(data.eval, float | None):
        sources["eval"] = source_config(data.eval).path
    return PreparedData(
        artifact=artifact,
        audit=audit,
        format=tally.format or data.format,
        train_examples=train.examples,
        eval_examples=held_out.examples if held_out else 0,
        eval_rows=audit.eval_rows,
        sources=sources,
        end_tokens=tuple(sorted(tally.end_tokens)),
    )


def _artifact(folder: Path, files: Iterable[FileEntry]) -> Artifact:
    return Artifact(kind="data", source=str(folder), fingerprint=folder.name, files=tuple(files))


def _reuse(folder: Path) -> PreparedData | None:
    """The data set of a complete folder."""
    manifest: Any = storage.read_manifest(folder)
    if manifest is None:
        return None
    files = [FileEntry.model_validate(entry) for entry in manifest["files"]]
    try:
        return PreparedData(artifact=_artifact(folder, files), **manifest["prepared"])
    except (KeyError, TypeError, ValueError):
        return None


def _fingerprint(data: DataConfig, model: ModelInfo) -> str:
    """Name of everything the prepared data depends on: rows, tokenizer, settings and code."""
    files = source_files(data.train)
    if not isinstance(data.eval, float | None):
        files = files + source_files(data.eval)
    states = [(str(path.absolute()), path.stat()) for path in files]
    parts = {
        "recipe": [
            _RECIPE,
            version("dbx_llmtrain"),
            version("transformers"),
            version("tokenizers"),
        ],
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in states],
        "tokenizer": [
            [entry.path, entry.sha256]
            for entry in model.artifact.files
            if ".safetensors" not in entry.path
        ],
        "data": data.model_dump(mode="json", exclude={"cache_dir"}),
    }
    return digest(json.dumps(parts, sort_keys=True))


def _load_tokenizer(model: ModelInfo, *, trusted: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            **load_from(Path(model.artifact.source), trusted=trusted)
        )
    except Exception as error:
        # The tokenizers library raises bare Exceptions for files that it cannot read.
        raise refuse(f"the tokenizer of {model.source} cannot be loaded: {error}") from error


def _check_vocabulary(tokenizer: Any, model: ModelInfo) -> None:
    """Refuse a tokenizer that knows a token which the model has no embedding for."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= model.vocab_size:
        raise refuse(
            f"the tokenizer of {model.source} gives token {token!r} the id {highest}, but the "
            f"model has embeddings for ids below {model.vocab_size} only: use the tokenizer that "
            "the model was trained with, or resize the model's embeddings and save it first"
        )
