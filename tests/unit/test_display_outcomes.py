"""Evaluations, answers, exports and registered models in a terminal and in a notebook."""

from __future__ import annotations

from dbx_llmtrain.outcomes import Evaluation, Exported, Generations, RegisteredModel, Sample

STOPPED = Sample(prompt="what is 1 < 2?", text="true\n\tand so on", tokens=5, stopped=True)
CUT = Sample(prompt="again", text="\x1b[31mred\u202e", tokens=1024, stopped=False)


def test_an_evaluation_shows_metrics_rows_and_answers() -> None:
    found = Evaluation(
        model="/runs/first/checkpoints/step-00000002",
        metrics={"eval_loss": 1.23456789, "eval_perplexity": 3.4},
        rows=1200,
        trained_tokens=34567,
        samples=(STOPPED,),
        run_id="abc",
    )
    text, page = str(found), found._repr_html_()
    assert text.startswith("Evaluation of /runs/first/checkpoints/step-00000002\n---")
    assert "1,200 rows, 34,567 trained tokens\n" in text
    assert "eval_loss        1.23457\neval_perplexity  3.4\n" in text
    assert "MLflow run abc" in text
    assert text.endswith("> what is 1 < 2?\ntrue\n\tand so on")
    assert "<td" in page
    assert "what is 1 &lt; 2?" in page
    assert "1 < 2" not in page
    bare = Evaluation(model="m", metrics={}, rows=1, trained_tokens=1)
    assert str(bare) == "Evaluation of m\n---------------\n\n1 row, 1 trained token"
    assert "<th>prompt" not in bare._repr_html_()


def test_answers_keep_their_lines_and_steer_no_terminal() -> None:
    found = Generations(model="/runs/<b>", samples=(STOPPED, CUT))
    first, second = str(found).split("\n\n")
    assert first == "> what is 1 < 2?\ntrue\n\tand so on"
    assert second == "> again\n\ufffd[31mred\ufffd [cut at its longest]"
    page = found._repr_html_()
    assert "Answers of /runs/&lt;b&gt;" in page
    assert "white-space:pre-wrap" in page
    assert "1,024, cut at its longest" in page
    assert found[0] == STOPPED.text
    assert list(found) == found.texts == [STOPPED.text, CUT.text]
    assert len(found) == 2


def test_an_export_says_what_it_is_and_of_what() -> None:
    found = Exported(path="/x/export", source="/x/step", step=3000, dtype="bf16", bytes=3 * 2**30)
    text = str(found)
    assert "the whole model, bf16, 3.0 GiB" in text
    assert "/x/step, after step 3,000" in text
    assert "on the hub" not in text
    adapter = found.model_copy(update={"adapter": True, "hub": "https://hub/org/<name>"})
    assert "the adapter by itself" in str(adapter)
    assert "https://hub/org/<name>" in str(adapter)
    assert "org/&lt;name&gt;" in adapter._repr_html_()


def test_a_registered_model_says_how_it_is_loaded() -> None:
    found = RegisteredModel(
        name="main.ml.answers", version="3", uri="models:/main.ml.answers/3", alias="champion",
        run_id="r1", tags={"checkpoint": "/x/step"}, tracking_uri="sqlite:////x/mlflow.db",
    )  # fmt: skip
    text, page = str(found), found._repr_html_()
    assert 'mlflow.pyfunc.load_model("models:/main.ml.answers/3")' in text
    for part in ("champion", "transformers", "r1", "/x/step", "sqlite:////x/mlflow.db"):
        assert part in text
        assert part in page
    bare = RegisteredModel(name="answers", version="1", uri="models:/answers/1")
    assert "alias" not in str(bare)
    assert "MLflow run" not in str(bare)
