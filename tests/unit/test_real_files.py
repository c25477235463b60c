"""Real files as they are, prepared and previewed: formats recognised, no row and no token lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import examples
from dbx_llmtrain.driver.prepare import prepare_data
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.text.prepared import Split
from tests import tiny

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = tiny.model_folder(tmp_path_factory.mktemp("model"))
    return resolve_model(ModelConfig(source=str(folder)), folder / "cache", weights=False)


def config(folder: Path, name: str, model: ModelInfo) -> TrainConfig:
    if not (DATA / name).exists():
        pytest.skip(f"../shared/data/{name} is not on this machine")
    data = {"train": str(DATA / name), "eval": 0.05, "max_length": 4096, "chat_template": "chatml"}
    data["cache_dir"] = str(folder)
    return TrainConfig(model={"source": model.source}, data=data)


@pytest.mark.parametrize(
    ("name", "fmt", "rows"),
    [
        ("gsm8k_test.jsonl", "prompt_completion", 1319),
        ("gsm8k_test_messages.parquet", "messages", 1319),
        ("self_instruct_seed_tasks.jsonl", "instruction", 175),
        ("glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("glaive_multi_turn_messages.jsonl", "messages", 147),
        ("jcommonsenseqa_valid_instruct_ja.parquet", "instruction", 1119),
    ],
)
def test_a_real_file_is_prepared_and_shown(
    tmp_path: Path, model: ModelInfo, name: str, fmt: str, rows: int
) -> None:
    cfg = config(tmp_path, name, model)
    data = prepare_data(cfg, model, tmp_path)
    audit = data.audit
    assert data.format == fmt
    assert audit.read_rows == rows
    assert audit.read_rows == audit.train_rows + audit.eval_rows + sum(audit.dropped.values())
    assert audit.eval_rows > 0
    for split, info in data.splits.items():
        stored = Split(Path(data.artifact.source), split)
        assert (int(stored.tokens.sum()), int(stored.trained.sum())) == (info.tokens, info.trained)
        shown = examples.show_examples(cfg, model, data, count=3, split=split)
        assert len(shown.examples) == min(3, info.examples)
        assert f"Examples of {split}" in shown._repr_html_()
    assert audit.trained_end_tokens > 0


def test_choices_without_an_answer_are_refused_by_name(tmp_path: Path, model: ModelInfo) -> None:
    cfg = config(tmp_path, "jcommonsenseqa_v1.3_valid.jsonl", model)
    with pytest.raises(DataError, match=r"no known format has the columns choice0.*choice4"):
        prepare_data(cfg, model, tmp_path)
