"""The configuration of a run: frozen pydantic models, every fault reported at once.

The sections and their fields are the public contract; ``TrainConfig`` reads YAML, takes keyword
arguments and ``key.path=value`` overrides, and refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dbx_llmtrain import config_checks
from dbx_llmtrain import overrides as overrides_
from dbx_llmtrain.errors import ConfigError, Problem

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, docstrings are the field descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelConfig(Section):
    """Which model is trained."""

    source: str
    """Hugging Face hub id, folder (also ``/Volumes/...``, ``dbfs:/...``) or ``.gguf`` file."""

    revision: str | None = None
    """Branch, tag or commit of a hub model; resolved to a commit that the plan records."""

    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; ``auto`` is ``sdpa`` where the model has it, else ``eager``."""


class SourceConfig(Section):
    """One data source."""

    path: str
    """File or glob (``.jsonl``, ``.json``, ``.csv``, ``.parquet``), also under ``/Volumes``."""

    max_rows: PositiveInt | None = None
    """Use at most this many rows, in the order of the source."""


class DataConfig(Section):
    """What it is trained on, and which tokens count."""

    train: str | SourceConfig
    """The training rows."""

    eval: str | SourceConfig | Share | None = None
    """Held-out rows: a source, or the fraction of the training rows to hold out (chosen by the
    hash of a row's content, never by its position)."""

    format: Literal["auto", "messages", "prompt_completion", "instruction", "text"] = "auto"
    """Shape of a row. ``auto`` recognises it by its columns and refuses what is ambiguous."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns where they are not the usual ones: ``{our name: theirs}``."""

    objective: Literal["sft"] = "sft"
    """Supervised fine-tuning."""

    train_on: Literal["completion", "assistant", "last_assistant", "all"] | None = None
    """Which tokens are trained. Unset: ``assistant`` for chats, ``completion`` for prompts with an
    answer, ``all`` for plain text."""

    max_length: PositiveInt = 2048
    """Tokens of a row, and of a pack, at most."""

    overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What becomes of a longer row. A row whose every trained token is cut is dropped, counted."""

    packing: bool = True
    """Lay short rows end to end in one example; they never see each other."""

    cache_dir: str | None = None
    """Where prepared data and converted models are kept, on storage that every node sees.
    Default: ``.cache`` in ``checkpoint.dir``."""


class ParallelConfig(Section):
    """How ranks share the work."""

    kind: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """``auto``: ``single`` for one rank, ``fsdp`` for more."""

    shard: Literal["full"] = "full"
    """FSDP: parameters, gradients and optimizer state are all sharded."""


class OptimConfig(Section):
    """Fields of ``train``: batch, length and optimizer of the run."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data. Default 1 when ``max_steps`` is not given."""

    max_steps: PositiveInt | None = None
    """Optimizer steps; ends the run wherever in an epoch that is."""

    global_batch_size: PositiveInt | None = None
    """Examples of one optimizer step over all ranks. With packing an example is a pack of up to
    ``data.max_length`` tokens. Default 32, or what ``gradient_accumulation_steps`` gives."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches of a rank in a step, instead of ``global_batch_size``."""

    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Examples a rank runs at once. Never changes the numbers, only speed and memory."""

    learning_rate: Annotated[float, Field(gt=0, lt=10)] = 2e-5
    """The highest learning rate, reached after the warm-up."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up, down to ``min_learning_rate`` at the last step."""

    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Steps of linear warm-up (an integer), or their share of the run (below 1; rounded up)."""

    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of the last step. 0: of the step that would follow it, so that it learns."""

    optimizer: Literal["adamw"] = "adamw"
    """AdamW, fused where the device has it."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of matrices; norms, biases and other vectors never decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging constants."""

    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient's global norm to this, once per step. 0: never."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type; weights and optimizer state are fp32 in any case. ``auto``: ``bf16`` on a GPU
    that computes in it, else ``fp32``."""

    seed: NonNegativeInt = 0
    """Seed of the order of rows and of dropout."""

    eval_every: PositiveInt | None = None
    """Evaluate every so many steps. It is always done before the first and after the last."""

    log_every: PositiveInt = 1
    """Report the loss every so many steps."""


class CheckpointConfig(Section):
    """Where the run folder is, and what is kept in it."""

    dir: str | None = None
    """Parent of the run folder, on storage that every node and the driver see
    (``/Volumes/catalog/schema/volume/runs``). Default ``./runs`` where driver and workers are one
    machine; on a cluster it has to be given."""

    every: PositiveInt | Literal["never"] = "never"
    """Checkpoint every so many steps. One is always written at the end."""

    export: bool = True
    """Write the result as a Hugging Face folder at the end."""

    resume: str = "auto"
    """``auto``: from the newest complete checkpoint of the run folder, if any; ``never``; or the
    path of a checkpoint."""


class TrackingConfig(Section):
    """The MLflow run."""

    experiment: str | None = None
    """Experiment name. Default: the notebook's on Databricks, else ``dbx_llmtrain``."""

    run_name: str | None = None
    """Name of the MLflow run and of the run folder. Default: made of the date and time."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the MLflow run."""

    log_checkpoints: bool = False
    """Also copy the last checkpoint's files to the MLflow run's artifacts."""


class ClusterConfig(Section):
    """Which machines are used, and how."""

    processes: PositiveInt | Literal["auto"] = "auto"
    """Ranks. ``auto``: one for every GPU; on CPU one for every executor (1 in local mode)."""

    use_gpu: bool | Literal["auto"] = "auto"
    """``auto``: where Spark's workers have GPUs."""

    local_mode: bool | Literal["auto"] = "auto"
    """Run the ranks on the driver's own machine. ``auto``: on a single node."""

    local_dir: str | None = None
    """Folder on every node's own disk. Default ``/local_disk0/dbx_llmtrain`` where a node can
    write it, else ``dbx_llmtrain`` in its temporary folder."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every rank. No secrets: those are taken from the driver's environment."""


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "train": OptimConfig,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
    "cluster": ClusterConfig,
}


class TrainConfig(Section):
    """A whole run. ``model.source`` and ``data.train`` are the only fields without a default.

    Raises ``ConfigError`` (also a ``ValueError``) that lists every fault.
    """

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    train: OptimConfig = Field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    def __init__(self, **sections: Any) -> None:
        checked, problems = _check_sections(sections)
        problems += config_checks.combinations(checked)
        if problems:
            raise ConfigError(problems)
        super().__init__(**checked)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *overrides: str) -> TrainConfig:
        """Build from nested mappings; ``overrides`` are ``"train.learning_rate=1e-5"`` strings."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                [Problem("", f"expected sections {', '.join(SECTIONS)}, found {_kind(values)}")]
            )
        changed, problems = overrides_.apply(dict(values), overrides)
        return _build(cls, changed, problems)

    @classmethod
    def from_yaml(cls, source: str | Path, *overrides: str) -> TrainConfig:
        """Read a YAML file (a path, or the text of one when it holds a line break)."""
        text, name = _read_yaml(source)
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError([Problem("", f"{name} is not valid YAML: {error}")]) from error
        if values is None:
            raise ConfigError([Problem("", f"{name} is empty: expected model and data sections")])
        return cls.from_dict(values, *overrides)

    def override(self, *overrides: str) -> TrainConfig:
        """A copy with ``"key.path=value"`` strings applied (values are read as YAML)."""
        changed, problems = overrides_.apply(self.to_dict(), overrides)
        return _build(type(self), changed, problems)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts with the fields that were set."""
        sections = self.model_dump(mode="json", exclude_unset=True)
        return {name: fields for name, fields in sections.items() if fields}

    def to_yaml(self) -> str:
        """YAML that ``from_yaml`` reads back to an equal configuration."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def require(cfg: object) -> TrainConfig:
    """``cfg`` itself. Raises ``ConfigError`` for anything that is not a ``TrainConfig``."""
    if isinstance(cfg, TrainConfig):
        return cfg
    use = "TrainConfig.from_dict(...)" if isinstance(cfg, Mapping) else "TrainConfig.from_yaml(...)"
    raise ConfigError([Problem("", f"expected a TrainConfig, found {_kind(cfg)}: use {use}")])


def _build(
    cls: type[TrainConfig], values: Mapping[str, Any], problems: list[Problem]
) -> TrainConfig:
    """The configuration; faults of the overrides and of the values are reported together."""
    try:
        cfg = cls(**values)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return cfg


def field_paths() -> list[str]:
    """Dotted paths of every field, in the order of the sections."""
    return [f"{name}.{field}" for name, cls in SECTIONS.items() for field in cls.model_fields]


def _check_sections(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The sections that are valid by themselves, and every fault of the others."""
    problems = [
        config_checks.unknown_key(name, [*SECTIONS, *field_paths()])
        for name in values
        if name not in SECTIONS
    ]
    checked: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        if name not in values and name in ("model", "data"):
            needed = "source" if name == "model" else "train"
            problems.append(Problem(f"{name}.{needed}", "missing: it has no default"))
        elif name in values:
            section, found = _check_section(name, cls, values[name])
            problems += found
            if section is not None:
                checked[name] = section
        else:
            checked[name] = cls()
    return checked, problems


def _check_section(
    name: str, cls: type[Section], value: Any
) -> tuple[Section | None, list[Problem]]:
    if isinstance(value, cls):
        return value, []
    if isinstance(value, Section) or not isinstance(value, Mapping):
        return None, [Problem(name, f"expected a mapping of fields, found {_kind(value)}")]
    known = {key: item for key, item in value.items() if key in cls.model_fields}
    problems = [
        config_checks.unknown_key(f"{name}.{key}", field_paths())
        for key in value
        if key not in cls.model_fields
    ]
    for key in list(known):
        later = config_checks.not_yet(f"{name}.{key}", known[key])
        if later:
            problems.append(later)
            del known[key]
    try:
        section = cls(**known)
    except ValidationError as error:
        # A required field that was refused by name is not missing.
        told = {problem.path for problem in problems}
        found = config_checks.from_pydantic(name, error)
        return None, problems + [problem for problem in found if problem.path not in told]
    return section, problems


def _read_yaml(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        return source, "the configuration"
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError:
        raise ConfigError([Problem("", f"no file {path} (looked in {Path.cwd()})")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", f"{path} cannot be read: {error}")]) from error


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
