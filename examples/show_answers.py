"""What a run has changed: one question, answered before and after, and where everything is.

Usage::

    python examples/show_answers.py RUN_DIR [--question TEXT]

``RUN_DIR`` is a run folder, or the folder of several: the newest finished run is taken. The
question is the first held-out one unless given. The models are loaded with plain transformers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

MAX_NEW_TOKENS = 200


class Answer(NamedTuple):
    """A greedy answer. ``ended``: the model ended it itself, before the limit."""

    text: str
    tokens: int
    ended: bool


def find_run(folder: Path) -> Path:
    """``folder`` itself or the newest run in it that has finished."""
    results = [folder / "result.json", *folder.glob("*/result.json")]
    finished = [path for path in results if path.is_file()]
    if not finished:
        raise SystemExit(f"{folder} has no finished run: no result.json in it or one level below")
    return max(finished, key=lambda path: path.stat().st_mtime).parent


def first_question(plan: dict[str, Any]) -> str:
    """The user's words in the first row of the held-out file."""
    source = plan["config"].get("data", {}).get("eval")
    path = Path(source["path"] if isinstance(source, dict) else str(source))
    try:
        with path.open(encoding="utf-8") as rows:
            messages = json.loads(rows.readline())["messages"]
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is not a .jsonl file of messages: give --question") from None
    return str(next(turn["content"] for turn in messages if turn["role"] == "user"))


def answer(folder: str, question: str) -> Answer:
    """What the model in ``folder`` says, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    length = prompt["input_ids"].shape[1]
    with torch.no_grad():
        output = model.generate(
            input_ids=prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=tokenizer.eos_token_id,
        )
    ids = output[0, length:].tolist()
    ended = bool(ids) and ids[-1] in _end_ids(model.generation_config.eos_token_id)
    return Answer(tokenizer.decode(ids, skip_special_tokens=True).strip(), len(ids), ended)


def _end_ids(value: int | list[int] | None) -> set[int]:
    return set(value) if isinstance(value, list) else {value} - {None}  # type: ignore[return-value]


def report(run: Path, question: str | None) -> Iterable[str]:
    """The lines to print."""
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    exported = result["model_path"]
    if not exported:
        raise SystemExit(f"{run} has no exported model: run with checkpoint.export true")
    question = question or first_question(plan)
    yield f"Question: {question}"
    for name, folder in (
        ("before", plan["model"]["artifact"]["source"]),
        ("after ", exported),
    ):
        said = answer(folder, question)
        end = "ended by itself" if said.ended else f"cut at {MAX_NEW_TOKENS} tokens"
        yield f"\nAnswer {name} ({said.tokens} tokens, {end}):\n{said.text}"
    metrics = result["metrics"]
    before, after = metrics.get("initial_eval_loss"), metrics.get("eval_loss")
    if before and after:
        yield f"\nHeld-out loss: {before:.3f} before, {after:.3f} after ({after / before - 1:+.0%})"
    yield f"Run folder:     {run}"
    yield f"Exported model: {exported}"
    tracking = plan.get("tracking")
    if tracking:
        yield f"MLflow's page:  mlflow ui --backend-store-uri {shlex.quote(tracking['uri'])}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--question")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for line in report(find_run(arguments.run_dir), arguments.question):
        print(line, flush=True)


if __name__ == "__main__":
    main()
