"""What the tasks of a preparation report, added up: faults, audit, splits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dbx_llmtrain.driver.inputs import Input
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.records import Audit, SplitInfo
from dbx_llmtrain.sections import DataConfig
from dbx_llmtrain.text.prepared import SplitStats
from dbx_llmtrain.worker.part import FAULTS_SHOWN, Tally, merge, of_split

_CURE = (
    "Correct them, or leave them out: data.formatter names a function that gets each row and "
    "leaves it out by returning None."
)
_PLACE = re.compile(r"(.*?, (?:line|row|byte) \d+(?:, instance \d+)?): ", re.DOTALL)
NOTHING_IN_PIECE = "piece of a long row without a trained token"


def share(data: DataConfig, role: str, inputs: Sequence[Input]) -> float:
    """The share of the training rows that a split gets, where it has no source of its own."""
    value = getattr(data, role)
    own = any(item.role.partition("-")[0] == role for item in inputs)
    return value if isinstance(value, float) and not own else 0.0


def wanted_splits(data: DataConfig, inputs: Sequence[Input]) -> list[str]:
    """The splits that must have rows."""
    shares = [role for role in ("eval", "test") if share(data, role, inputs)]
    return list(dict.fromkeys([*(item.role for item in inputs), *shares]))


def check(tallies: Sequence[Tally], inputs: Sequence[Input], splits: Sequence[str]) -> None:
    """Raise ``DataError`` for rows that cannot be right, for rows that have changed while they were
    read, and for a split without a row."""
    for tally in tallies:
        if tally.error:
            raise DataError(tally.error)
    _check_faults(tallies)
    for number, item in enumerate(inputs):
        if item.table is not None and item.table.content is not None:
            found = sum(tally.content for tally in tallies if tally.source == number) % 2**64
            if found != item.table.content:
                raise DataError(
                    f"{item.told} gave other rows when it was read a second time (its query is "
                    "not deterministic, or its tables have changed): write it to a table first, or "
                    "cache it"
                )
    rows = merge(tally.rows for tally in tallies)
    for split in splits:
        if not rows.get(split):
            raise DataError(_nothing_left(split, tallies, inputs))


def _check_faults(tallies: Sequence[Tally]) -> None:
    faults = sorted((order, text) for tally in tallies for order, text in tally.faults)
    if not faults:
        return
    number = sum(tally.faulty for tally in tallies)
    told = _alike([text for _, text in faults], number)
    lines = "\n".join(f"  - {text}" for text in told[:FAULTS_SHOWN])
    count = "1 row" if number == 1 else f"{number} rows"
    if any(tally.stopped for tally in tallies):
        count = f"at least {count}"
        lines = f"(reading stopped where there were many; these are the first)\n{lines}"
    raise DataError(f"{count} cannot be used:\n{lines}\n{_CURE}")


def _alike(texts: Sequence[str], number: int) -> list[str]:
    """The known ones of a number of faults, those that say the same in one line with the first."""
    among = f" of the first {len(texts)}" if number > len(texts) else ""
    groups: dict[str, list[str]] = {}
    for text in texts:
        place = _PLACE.match(text)
        groups.setdefault(text[place.end() :] if place else text, []).append(text)
    told = []
    for message, group in groups.items():
        place = _PLACE.match(group[0])
        more = f"{place[1]} and {len(group) - 1} more{among}" if place and len(group) > 1 else ""
        told.append(f"{more}: {message}" if more else group[0])
    return told


def _nothing_left(split: str, tallies: Sequence[Tally], inputs: Sequence[Input]) -> str:
    """The message for a split without rows, with what became of those it could have had."""
    role = split if any(item.role == split for item in inputs) else "train"
    mine = [tally for tally in tallies if inputs[tally.source].role == role]
    dropped = merge(tally.dropped for tally in mine)
    reasons = ", ".join(f"{count}: {reason}" for reason, count in dropped.items()) or "none"
    name, _, called = split.partition("-")
    what = {
        "train": "to train on",
        "eval": "to evaluate on",
        "test": "to test on",
    }[name] + (f" as {called}" if called else "")
    advice = "" if name == "train" else f": give data.{name} a larger share or other rows"
    read = sum(tally.counted for tally in mine)
    alike = len({key for tally in mine for key in tally.keys}) == 1
    same = "; all rows are equal, and equal rows are never parted" if alike else ""
    return f"of {read} rows none is left {what}{advice} (rows dropped: {reasons}{same})"


def audit(tallies: Sequence[Tally], packs: Mapping[str, SplitStats], max_length: int) -> Audit:
    """Where every row and token went."""
    train = packs["train"]
    rows = merge(tally.rows for tally in tallies)
    dropped_examples = merge(tally.dropped_examples for tally in tallies)
    for name, stats in packs.items():
        if stats.documents_dropped:
            dropped_examples[of_split(NOTHING_IN_PIECE, name)] = stats.documents_dropped
    lengths = merge(tally.lengths for tally in tallies)
    found = Audit(
        read_rows=sum(tally.counted for tally in tallies),
        source_rows=sum(tally.read for tally in tallies),
        train_rows=rows["train"],
        eval_rows=sum(count for name, count in rows.items() if name.partition("-")[0] == "eval"),
        test_rows=rows.get("test", 0),
        train_examples=sum(lengths.values()),
        dropped=merge(tally.dropped for tally in tallies),
        dropped_examples=dropped_examples,
        truncated_rows=sum(merge(tally.truncated for tally in tallies).values()),
        cut_tokens=sum(stats.tokens_cut for stats in packs.values()),
        dropped_tokens=sum(merge(tally.dropped_tokens for tally in tallies).values())
        + sum(stats.tokens_dropped for stats in packs.values()),
        tokens=train.tokens,
        trained_tokens=train.trained,
        trained_end_tokens=train.ends,
        packs=train.examples,
        packing_efficiency=train.tokens / (train.examples * max_length),
        lengths=tuple(
            lengths.get(str(bits), 0) for bits in range(1 + max(map(int, lengths), default=-1))
        ),
    )
    held_out = found.eval_rows + found.test_rows
    assert found.read_rows == found.train_rows + held_out + sum(found.dropped.values())
    return found


def splits(
    tallies: Sequence[Tally], packs: Mapping[str, SplitStats], in_train: Mapping[str, int]
) -> dict[str, SplitInfo]:
    """What is in every split; ``in_train``: how many of its rows are training rows too."""
    truncated = merge(tally.truncated for tally in tallies)
    dropped = merge(tally.dropped_tokens for tally in tallies)
    return {
        name: SplitInfo(
            examples=stats.examples,
            rows=stats.rows,
            tokens=stats.tokens,
            trained=stats.trained,
            truncated_rows=truncated.get(name, 0),
            cut_tokens=stats.tokens_cut,
            dropped_tokens=dropped.get(name, 0) + stats.tokens_dropped,
            rows_in_train=in_train.get(name, 0),
            digest=stats.digest,
        )
        for name, stats in packs.items()
    }
