"""The configuration of a run: frozen pydantic models, every fault reported at once.

The sections and their fields are the public contract; ``TrainConfig`` reads YAML, takes keyword
arguments and ``key.path=value`` overrides, and refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from dbx_llmtrain import config_checks, yaml_text
from dbx_llmtrain import overrides as overrides_
from dbx_llmtrain.config_checks import MAPPINGS
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.model_sections import ModelConfig, OptimConfig, ParallelConfig
from dbx_llmtrain.secret_text import hide
from dbx_llmtrain.section_types import Section
from dbx_llmtrain.sections import (
    SECTIONS,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    TrackingConfig,
)


class TrainConfig(Section):
    """A whole run. ``model.source`` is the only field without a default; ``data.train`` may only be
    left out where the rows are passed as ``train(cfg, data=...)``.

    Raises ``ConfigError`` (also a ``ValueError``) that lists every fault.
    """

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    train: OptimConfig = Field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    def __init__(self, /, *positional: Any, **sections: Any) -> None:
        if positional:
            raise _not_sections(positional[0])
        sections, secrets = config_checks.without_secrets(sections)
        checked, problems = _check_sections(sections)
        problems += config_checks.not_told(config_checks.combinations(checked), problems)
        if problems or secrets:
            raise ConfigError([*secrets, *config_checks.not_told(problems, secrets)])
        super().__init__(**checked)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *overrides: str) -> TrainConfig:
        """Build from nested mappings; ``overrides`` are ``"train.learning_rate=1e-5"`` strings.

        One of ``train.epochs`` and ``train.max_steps`` takes the place of the other one.
        """
        if isinstance(values, str | Path):
            raise _not_sections(values)
        if not isinstance(values, Mapping):
            raise ConfigError(
                [Problem("", f"expected sections {', '.join(SECTIONS)}, found {_kind(values)}")]
            )
        changed, problems = overrides_.apply(dict(values), overrides)
        return _build(cls, changed, problems)

    @classmethod
    def from_yaml(cls, source: str | Path, *overrides: str) -> TrainConfig:
        """Read a YAML file (a path, or the text of one when it holds a line break)."""
        if not isinstance(source, str | Path):
            raise _not_sections(source)
        text, name = _read_yaml(source)
        values, problems = yaml_text.read(text, name)
        if problems:
            raise ConfigError(problems)
        if values is None:
            raise ConfigError([Problem("", f"{name} is empty: expected model and data sections")])
        return cls.from_dict(values, *overrides)

    def override(self, *overrides: str) -> TrainConfig:
        """A copy with ``"key.path=value"`` strings applied (values are read as YAML).

        One of ``train.epochs`` and ``train.max_steps`` takes the place of the other one.
        """
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
    raise ConfigError([Problem("", f"expected a TrainConfig, found {_kind(cfg)}: {_use(cfg)}")])


def _use(value: object) -> str:
    """What makes a configuration of a value that is none."""
    return f"use TrainConfig.{'from_dict' if isinstance(value, Mapping) else 'from_yaml'}(...)"


def _not_sections(value: object) -> ConfigError:
    """The error for a value that was given to the wrong way of making a configuration."""
    if isinstance(value, TrainConfig):
        return ConfigError([Problem("", "this is a TrainConfig already: use it as it is")])
    what = "mappings" if isinstance(value, Mapping) else "the path or the text of a YAML file"
    use = _use(value) if isinstance(value, Mapping | str | Path) else (
        "use TrainConfig.from_yaml(path) or TrainConfig.from_dict(mapping)"
    )  # fmt: skip
    return ConfigError([Problem("", f"found {_kind(value)}: {use} for {what}")])


def _build(
    cls: type[TrainConfig], values: Mapping[str, Any], problems: list[Problem]
) -> TrainConfig:
    """The configuration; faults of the overrides and of the values are reported together."""
    try:
        cfg = cls(**{str(name): fields for name, fields in values.items()})
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
        problem
        for name, value in values.items()
        if name not in SECTIONS
        for problem in config_checks.unknown_key(name, [*SECTIONS, *field_paths()], value)
    ]
    checked: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        if name in values:
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
        problem
        for key, item in value.items()
        if key not in cls.model_fields
        for problem in config_checks.unknown_key(f"{name}.{key}", field_paths(), item)
    ]
    for key in list(known):
        path = f"{name}.{key}"
        later = config_checks.not_yet(path, known[key])
        keys_of = config_checks.renamed_keys if key in MAPPINGS else config_checks.inner_keys
        theirs = keys_of(path, known[key])
        if later or theirs:
            problems += [later] if later else theirs
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
    return "nothing" if value is None else f"{type(value).__name__} {hide(str(value))[:60]!r}"
