"""Fine-tune and pre-train Hugging Face language models on every GPU of a Spark cluster.

::

    import dbx_llmtrain as llm

    cfg = llm.TrainConfig.from_yaml("config.yaml")
    llm.probe()               # every node: GPUs, disk, memory, versions
    llm.plan(cfg)             # what will run and why, what fits, how long it takes
    llm.plan(cfg, cluster="2x8xH100-80GB")    # the same before there is a cluster
    llm.preview(cfg)          # rows as the model sees them, and what is trained of them
    llm.prepare(cfg)          # tokenise and pack the data; train() finds the result
    result = llm.train(cfg)
    llm.watch("/Volumes/.../first")           # a run from elsewhere, while it lasts and afterwards
    llm.launch(function, 1, 2)                # a function of your own on every rank

Names are imported when they are first used, so importing the package costs nothing and changes
nothing. Warnings go to the logger ``dbx_llmtrain``; where no logging is set up, Python prints them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbx_llmtrain.api import launch, plan, prepare, preview, probe, train
    from dbx_llmtrain.api_results import evaluate, export, generate, load, log, register, watch
    from dbx_llmtrain.config import TrainConfig
    from dbx_llmtrain.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        LlmTrainError,
        RegistryError,
        StagingError,
        SubmitError,
        TrainingFailed,
    )
    from dbx_llmtrain.forecasts import Forecast
    from dbx_llmtrain.outcomes import Evaluation, Exported, Generations, Logged, RegisteredModel
    from dbx_llmtrain.previewing import Preview
    from dbx_llmtrain.records import Audit, PreparedData, RunPlan, TrainResult
    from dbx_llmtrain.reports import ClusterReport

    __version__: str

__all__ = [
    "Audit",
    "CheckpointError",
    "ClusterError",
    "ClusterReport",
    "ConfigError",
    "DataError",
    "Evaluation",
    "Exported",
    "Forecast",
    "Generations",
    "LlmTrainError",
    "Logged",
    "PreparedData",
    "Preview",
    "RegisteredModel",
    "RegistryError",
    "RunPlan",
    "StagingError",
    "SubmitError",
    "TrainConfig",
    "TrainResult",
    "TrainingFailed",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "launch",
    "load",
    "log",
    "plan",
    "prepare",
    "preview",
    "probe",
    "register",
    "train",
    "watch",
]

_HOMES = {
    "api": ("launch", "plan", "prepare", "preview", "probe", "train"),
    "api_results": ("evaluate", "export", "generate", "load", "log", "register", "watch"),
    "config": ("TrainConfig",),
    "errors": (
        "CheckpointError",
        "ClusterError",
        "ConfigError",
        "DataError",
        "LlmTrainError",
        "RegistryError",
        "StagingError",
        "SubmitError",
        "TrainingFailed",
    ),
    "forecasts": ("Forecast",),
    "outcomes": ("Evaluation", "Exported", "Generations", "Logged", "RegisteredModel"),
    "previewing": ("Preview",),
    "records": ("Audit", "PreparedData", "RunPlan", "TrainResult"),
    "reports": ("ClusterReport",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dbx_llmtrain")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"dbx_llmtrain.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
