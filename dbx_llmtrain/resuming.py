"""What a run that goes on from a checkpoint must have in common with the one that wrote it, what
of it is another run's, and when a run that is finished goes on all the same. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dbx_llmtrain import optimizers, storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.records import ModelInfo, RunPlan

_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece")
"""How the names of a tokenizer's files begin."""
_ORDER = {"shuffle", "group_by_length", "longest_first", "mlm_probability"}
_TOKENS = {"objective", "format", "train_on", "max_length", "overflow", "packing"}
"""Fields of ``data``: of the order of its examples, and of what is in them. (The digest of the
training split covers the latter as well. By themselves they say what was changed.)"""
_NAMES = {
    "global_batch_size": "train.global_batch_size",
    "seed": "train.seed",
    "optimizer": "train.optimizer",
    "lora": "model.lora",
    "load_in_4bit": "model.load_in_4bit",
    "chat_template": "data.chat_template",
    **{name: f"data.{name}" for name in _ORDER | _TOKENS},
}
"""Fields of the configuration by the names that an identity has for them."""
STARTING_POINT = ("steps to train", "resumes from", "held-out rows")
"""Names of the decisions of ``starting_point``."""
_SHOWN = 60
"""Characters of a text that are shown of it."""


def identity(plan: RunPlan) -> dict[str, Any]:
    """What decides the numbers of a run, as JSON: a checkpoint keeps it.

    Not the strategy, the ranks or how a step is cut, which change no number; nor what may be
    changed on the way: steps, learning rate, the rows that are held out and when they are
    evaluated, what is saved and logged. Of the model only ``fingerprint`` counts, of the data only
    ``digest``: that of the training examples in their order. The rest is there to be told.
    """
    model, train, data = plan.config.model, plan.config.train, plan.config.data
    training = plan.data.splits["train"]
    shares = {name: getattr(data, name) for name in ("eval", "test")}
    return {
        "model": {
            "fingerprint": plan.model.artifact.fingerprint,
            "source": plan.model.source,
            "revision": plan.model.revision,
        },
        "tokenizer": _tokenizer(plan.model),
        "data": {
            "digest": training.digest,
            "rows": training.rows,
            "source": plan.data.sources.get("train", ""),
            "held_out": {name: one for name, one in shares.items() if isinstance(one, float)},
        },
        "chat_template": plan.data.chat_template,
        "global_batch_size": plan.global_batch_size,
        "seed": train.seed,
        "optimizer": optimizers.name_of(train.optimizer),
        "lora": model.lora.model_dump(mode="json") if model.lora else None,
        "load_in_4bit": model.load_in_4bit,
        **data.model_dump(mode="json", include=_ORDER | _TOKENS),
    }


def held_out(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """The rows by which a run is judged, as JSON: a checkpoint keeps it with its state. They may
    change on the way. ``used`` are the examples that are evaluated between the steps."""
    most = plan.config.train.eval_max_rows
    return {
        name: {
            "digest": split.digest,
            "rows": split.rows,
            "used": min(split.examples, most or split.examples),
        }
        for name, split in plan.data.splits.items()
        if name not in ("train", "test")
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of ``now`` (an identity, or a part of one) was another ``before``, in words."""
    if any(isinstance(before.get(name), str) for name in ("model", "data")):
        return ["it was written by another version of dbx_llmtrain"]
    found = {name: list(_difference(name, before.get(name), now[name])) for name in now}
    tokens = any(found.get(name) for name in ("tokenizer", "chat_template", *_TOKENS))
    if "data" in now and tokens and _same_rows(before.get("data"), now["data"]):
        del found["data"]  # that its tokens are others has its reason beside it
    return [text for texts in found.values() for text in texts]


def check_resume(plan: RunPlan, manifest: Mapping[str, Any], folder: str) -> None:
    """Raise ``CheckpointError`` where a plan cannot go on from a checkpoint with this manifest."""
    before: Mapping[str, Any] = manifest.get("identity", {})
    now = identity(plan)
    changed = differences(before, now)
    step = _step(manifest)
    if step > plan.total_steps:
        changed.append(f"it is after step {step}, the run ends with step {plan.total_steps}")
    if changed:
        raise CheckpointError(
            f"this run cannot go on from {folder}: {'; '.join(changed)}. {advice(before, now)}"
        )


def advice(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What to do where identities differ."""
    undo = "Undo the change, or start afresh under another tracking.run_name"
    if _key(before.get("data"), "digest") == _key(now.get("data"), "digest"):
        return undo
    return (
        f"{undo} (to train the same model further on other rows: with its export as model.source)"
    )


def judged_by_other_rows(plan: RunPlan, manifest: Mapping[str, Any]) -> str:
    """How the rows by which a run is judged have changed since a checkpoint, in words; empty where
    they have not."""
    before: Mapping[str, Any] | None = manifest.get("state", {}).get("held_out")
    now = held_out(plan)
    if before is None:
        return ""
    found: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        label = f"data.{name.replace('-', '.', 1)}"
        found += _held_out_rows(label, before.get(name), now.get(name))
    return "; ".join(found)


def is_of_another_run(plan: RunPlan, folder: str | Path) -> bool:
    """Whether a checkpoint does not lie in the plan's own run folder."""
    return Path(folder).parent.parent != storage.local_path(plan.run_dir)


def starting_point(plan: RunPlan, manifest: Mapping[str, Any], folder: str) -> tuple[Decision, ...]:
    """What a plan has to say of the checkpoint that it goes on from: where nothing is left to
    train, where it is another run's, where other rows are held out."""
    step = _step(manifest)
    found: list[Decision] = []
    if step == plan.total_steps:
        done = "evaluated and exported" if plan.config.checkpoint.export else "evaluated"
        why = f"nothing is left to train: all {step} are done in {folder}; its model is {done}"
        found.append(Decision(name="steps to train", value=0, reason=why))
    if is_of_another_run(plan, folder):
        why = (
            "another run: times, losses before and the best so far are left to it; a best model "
            "is looked for among this run's own checkpoints"
        )
        found.append(Decision(name="resumes from", value=f"step {step}", reason=why))
    elif changed := judged_by_other_rows(plan, manifest):
        found.append(
            Decision(name="held-out rows", value="changed", reason=other_rows(changed, step))
        )
    return tuple(found)


def other_rows(changed: str, step: int) -> str:
    """What it means that the rows by which a run is judged have ``changed``."""
    return (
        f"held-out rows changed since step {step} ({changed}): eval metrics before and after are "
        "of different rows, so that the best so far counts no more"
    )


def _step(manifest: Mapping[str, Any]) -> int:
    return int(manifest.get("state", {}).get("step", 0))


def asks_more(before: RunPlan, now: RunPlan) -> bool:
    """Whether a run that ended before its last step is to go on: it has more steps or time than it
    had, or waits longer for a better model."""
    old, new = before.config.train, now.config.train
    return (
        now.total_steps > before.total_steps
        or _more(old.max_time, new.max_time)
        or _waits_longer(before, now)
    )


def _more(before: str | None, now: str | None) -> bool:
    """Of ``train.max_time``; ``None`` is no limit."""
    if before is None or now is None:
        return now is None and before is not None
    return [int(part) for part in now.split(":")] > [int(part) for part in before.split(":")]


def _waits_longer(before: RunPlan, now: RunPlan) -> bool:
    """Of ``train.early_stopping``."""
    old, new = _patience(before), _patience(now)
    if old is None or new is None:
        return new is None and old is not None
    return new[0] > old[0] or (new[0] == old[0] and new[1] < old[1])


def _patience(plan: RunPlan) -> tuple[int, float] | None:
    found = plan.config.train.early_stopping
    if found is None or isinstance(found, int):
        return (found, 0.0) if found is not None else None
    return found.patience, found.min_delta


def changed_settings(before: RunPlan, now: RunPlan) -> list[str]:
    """Fields of the configuration that are set to something else than before, in words. (Where a
    run writes and how it is shown is of no account.)"""
    old, new = before.config.to_dict(), now.config.to_dict()
    return [
        text
        for section in sorted((old.keys() | new.keys()) - {"tracking", "checkpoint"})
        for text in _fields(section, old.get(section, {}), new.get(section, {}))
    ]


def _difference(name: str, before: Any, now: Any) -> Iterator[str]:
    """One part of an identity, in words; nothing where it is the same."""
    if name == "model":
        yield from _model(before, now)
    elif name == "data":
        yield from _rows(before, now)
    elif name == "tokenizer":
        yield from _files("the tokenizer", before, now)
    else:
        yield from _fields(_NAMES.get(name, name), before, now)


def _model(before: Any, now: Mapping[str, Any]) -> Iterator[str]:
    if _key(before, "fingerprint") == now["fingerprint"]:
        return
    then, today = (_source_of(one) for one in (before, now))
    if then == today:
        yield f"the model: the files of {today} (weights, config.json) are others than then"
    else:
        yield f"the model: {then} then, {today} now"


def _source_of(model: Any) -> str:
    revision = _key(model, "revision")
    return f"{_key(model, 'source')}{f' at {revision}' if revision else ''}"


def _files(what: str, before: Any, now: Mapping[str, str]) -> Iterator[str]:
    names = sorted(now.keys() | (before.keys() if isinstance(before, Mapping) else set()))
    if changed := [name for name in names if _key(before, name) != now.get(name)]:
        yield f"{what}: {', '.join(changed)} {'is' if len(changed) == 1 else 'are'} not as then"


def _rows(before: Any, now: Mapping[str, Any]) -> Iterator[str]:
    """The rows that are trained on."""
    if _key(before, "digest") == now["digest"]:
        return
    told = "data.train: "
    if _same_rows(before, now):
        told += f"{now['rows']} rows as then, but others, in another order or with other tokens"
    else:
        told += f"{_key(before, 'rows')} rows then, {now['rows']} now"
    if _key(before, "source") != now["source"]:
        told += f" (of {_key(before, 'source')} then, of {now['source']} now)"
    shares = list(_fields("data", _key(before, "held_out") or {}, now["held_out"]))
    yield told + (f"; their share that is held out is another, {', '.join(shares)}" * bool(shares))


def _same_rows(before: Any, now: Mapping[str, Any]) -> bool:
    """Whether there are as many, of the same sources, and nothing shows that they are others."""
    return all(_key(before, name) == now[name] for name in ("rows", "source"))


def _held_out_rows(label: str, before: Any, now: Any) -> Iterator[str]:
    counts = [f"{one['rows']}" if one else "none" for one in (before, now)]
    if counts[0] != counts[1]:
        yield f"{label}: {counts[0]} then, {counts[1]} now"
    elif before["digest"] != now["digest"]:
        yield f"{label}: {counts[0]} as then, but others"
    elif before["used"] != now["used"]:
        yield f"{label}: {before['used']} examples between the steps then, {now['used']} now"


def _fields(label: str, before: Any, now: Any) -> Iterator[str]:
    """Values of a field that differ; of nested ones each by itself."""
    if before == now:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted(before.keys() | now.keys()):
            yield from _fields(f"{label}.{name}", before.get(name), now.get(name))
    elif isinstance(before, str) and isinstance(now, str) and _is_long(before, now):
        yield f"{label}: differs, first difference {_first_difference(before, now)}"
    else:
        yield f"{label}: {_value(before)} then, {_value(now)} now"


def _is_long(*texts: str) -> bool:
    return any("\n" in text or len(text) > _SHOWN for text in texts)


def _first_difference(before: str, now: str) -> str:
    """Where two texts part, with what follows there in each."""
    place = next(
        (at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other),
        min(len(before), len(now)),
    )
    line = before.count("\n", 0, place) + 1
    begin = max(before.rfind("\n", 0, place) + 1, place - _SHOWN // 2)
    then, today = (_excerpt(text[begin:]) for text in (before, now))
    return f"at line {line}: {then} then, {today} now"


def _excerpt(text: str) -> str:
    line = text.split("\n", 1)[0]
    return repr(line[:_SHOWN] + ("..." if len(line) > _SHOWN else ""))


def _value(value: Any) -> str:
    """As it would be written in YAML, and no longer than a line."""
    if value is None:
        return "not set"
    if isinstance(value, Mapping) and value:
        parts = (f"{key}={_value(one)}" for key, one in value.items() if one is not None)
        text = ", ".join(parts)
    elif isinstance(value, str):
        return f"a text of {value.count(chr(10)) + 1} lines" if "\n" in value else _cut(value)
    else:
        text = json.dumps(value, default=str)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."


def _key(value: Any, name: str) -> Any:
    """An entry of what should be a mapping, and is not where another version has written it."""
    return value.get(name) if isinstance(value, Mapping) else None


def _tokenizer(model: ModelInfo) -> dict[str, str]:
    """Hashes of the files that turn text into tokens."""
    return {
        entry.path: entry.sha256[:24]
        for entry in sorted(model.artifact.files, key=lambda entry: entry.path)
        if entry.path.startswith((*_TOKENIZER, "chat_template"))
    }
