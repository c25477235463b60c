"""An exported model as MLflow keeps it: what answers, what it needs, and where it comes from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from dbx_llmtrain import compat, custom_code, storage
from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.credentials import collect, redact
from dbx_llmtrain.driver import served
from dbx_llmtrain.outcomes import CHECKPOINT
from dbx_llmtrain.records import RunPlan, TrainResult
from dbx_llmtrain.text.prompts import from_chats
from dbx_llmtrain.worker import node

MAX_TOKENS = 256
"""Of an answer, where neither a request nor the model's generation configuration has a limit."""

TAG = "dbx_llmtrain_"
"""Begins the tags of a model version. (Unity Catalog takes no dots in them.)"""

_TEXT = "text-generation"


@dataclass(frozen=True)
class Package:
    """Everything that is known of a model before it is logged.

    ``settings`` are those of ``served.py``; ``lineage`` says where the model comes from, by the
    names of tags; ``config`` is the run's configuration as YAML. ``from_disk``: the weights are not
    loaded, and there is no flavor for transformers.
    """

    folder: Path
    settings: dict[str, Any]
    requirements: tuple[str, ...]
    example: Any
    lineage: dict[str, str]
    config: str
    from_disk: bool
    trusted: bool

    @property
    def flavor(self) -> str:
        """MLflow's name of the flavor that the model has besides ``python_function``, if any."""
        return "python_function" if self.from_disk else "transformers"

    @property
    def metadata(self) -> dict[str, str]:
        """What the model's MLmodel file says of it; MLflow knows chat models by ``task``."""
        task = self.settings["task"]
        return {**self.lineage, **({"task": task} if task == served.CHAT else {})}

    def save_model(self, path: str, mlflow_model: Any, **_: Any) -> None:
        """Write the model with its MLmodel file to ``path``: what MLflow calls to log it."""
        from mlflow.utils.logging_utils import MLFLOW_LOGGING_STREAM

        with (
            tempfile.TemporaryDirectory() as name,
            custom_code.private_modules(None, wanted=self.trusted),
        ):
            code = _code(Path(name))
            save = self._save_folder if self.from_disk else self._save_loaded
            shown = MLFLOW_LOGGING_STREAM.enabled
            save(path, mlflow_model, code)
            MLFLOW_LOGGING_STREAM.enabled = shown  # a flavor turns MLflow's notes on again
        (Path(path) / "config.yaml").write_text(self.config, encoding="utf-8")

    def _save_folder(self, path: str, mlflow_model: Any, code: Path) -> None:
        """The export as it is, copied from disk to disk."""
        from mlflow import pyfunc

        pyfunc.save_model(
            path=path,
            mlflow_model=mlflow_model,
            loader_module=code.stem,
            data_path=str(self.folder),
            code_paths=[str(code)],
            signature=_signature(self.settings),
            input_example=self.example,
            pip_requirements=list(self.requirements),
            model_config=self.settings,
        )

    def _save_loaded(self, path: str, mlflow_model: Any, code: Path) -> None:
        """By MLflow's flavor for transformers. What answers is ours: see ``served.py``."""
        import mlflow.transformers
        from huggingface_hub import ModelCard

        chat = self.settings["task"] == served.CHAT
        mlflow.transformers.save_model(
            _pipeline(self.folder, self.settings, trusted=self.trusted),
            path=path,
            mlflow_model=mlflow_model,
            task=self.settings["task"],
            signature=None if chat else _signature(self.settings),  # chat has MLflow's own
            input_example=self.example,
            pip_requirements=list(self.requirements),
            code_paths=[str(code)],
            model_card=ModelCard(_card(self.lineage)),  # or it asks the hub for one of this path
        )
        # A text that says to look for the licence on the hub, at the path of this export.
        (Path(path) / "LICENSE.txt").unlink(missing_ok=True)
        places = {"model": "model", "tokenizer": "components/tokenizer"}
        for place in places.values() if self.trusted else ():
            _copy_code(self.folder, Path(path) / place)
        answering = mlflow_model.flavors[mlflow.pyfunc.FLAVOR_NAME]
        answering[mlflow.pyfunc.MAIN] = code.stem
        answering[mlflow.pyfunc.MODEL_CONFIG] = self.settings | places
        mlflow_model.save(str(Path(path) / "MLmodel"))


def pack(
    folder: Path, plan: RunPlan, result: TrainResult | None, *, limit: int | None = None
) -> Package:
    """What is to be logged of an export. ``limit``: bytes of weights from which on it is not
    loaded; by default half of this machine's memory."""
    trusted = plan.config.model.trust_remote_code
    mlm = plan.config.data.objective == "mlm"
    with custom_code.private_modules(None, wanted=trusted):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(**custom_code.load_from(folder, trusted=trusted))
    chat = not mlm and from_chats(plan.data.format, tokenizer)
    task = served.FILL_MASK if mlm else served.CHAT if chat else _TEXT
    settings = {
        "task": task,
        "name": plan.run_name,
        "kind": "AutoModelForMaskedLM" if mlm else "AutoModelForCausalLM",
        "load": dtype_argument("auto") | ({"trust_remote_code": True} if trusted else {}),
        "defaults": _defaults(_read_json(folder / "generation_config.json")),
        "model": ".",
        "tokenizer": ".",
    }
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Package(
        folder=folder,
        settings=settings,
        requirements=requirements(folder, trusted=trusted),
        example=_example(plan, task, tokenizer),
        lineage=lineage(folder, plan, result),
        config=redact(plan.config.to_yaml(), collect(os.environ)),
        from_disk=weights > (node.memory()[0] // 2 if limit is None else limit),
        trusted=trusted,
    )


def lineage(folder: Path, plan: RunPlan, result: TrainResult | None) -> dict[str, str]:
    """Where a model comes from, as tags. The checkpoint, in the run folder, is the one it was
    exported from: it has the optimizer's state, which is not logged."""
    checkpoint = Path(plan.run_dir) / storage.CHECKPOINTS / folder.name.removeprefix("export-")
    found = (storage.read_manifest(folder) or {}).get(CHECKPOINT)
    if found is None:  # made by the run itself, of its last or best model
        known = {"export": "checkpoint", "export-best": "best_checkpoint"}.get(folder.name, "")
        found = getattr(result, known, None) or (str(checkpoint) if checkpoint.is_dir() else None)
    values = {
        "run_id": plan.tracking.run_id if plan.tracking else None,
        "run_name": plan.run_name,
        "run_dir": plan.run_dir,
        "checkpoint": found,
        "base_model": plan.model.source,
        "base_revision": plan.model.revision,
        "base_fingerprint": plan.model.artifact.fingerprint,
        "data_fingerprint": plan.data.artifact.fingerprint,
        "data": "; ".join(f"{role}: {source}" for role, source in plan.data.sources.items()),
    }
    secrets = collect(os.environ)
    return {f"{TAG}{key}": redact(str(value), secrets) for key, value in values.items() if value}


def requirements(folder: Path, *, trusted: bool = False) -> tuple[str, ...]:
    """The packages that serve the model, in the versions that are installed here, without local
    parts such as ``+cu126``. MLflow adds itself. ``trusted``: with those that its code imports."""
    names = {"torch", "transformers", "accelerate"}
    if any(folder.glob("*.model")) and not (folder / "tokenizer.json").is_file():
        names |= {"sentencepiece", "protobuf"}
    if trusted:
        from transformers.dynamic_module_utils import get_imports

        modules = {name for path in folder.rglob("*.py") for name in get_imports(path)}
        known = packages_distributions()
        names |= {known[name][0] for name in modules if name in known}
    found = {name: compat.installed(name) for name in sorted(names)}
    return tuple(f"{name}=={version.public}" for name, version in found.items() if version)


def _code(folder: Path) -> Path:
    """``served.py`` under a name that changes with its content: Python imports a name once, and a
    process may load models that were logged by two versions."""
    text = Path(served.__file__).read_bytes()
    path = folder / f"served_{hashlib.sha256(text).hexdigest()[:12]}.py"
    path.write_bytes(text)
    return path


def _copy_code(source: Path, target: Path) -> None:
    """The code that comes with a model, which transformers 4.50 leaves behind when it saves."""
    for path in source.rglob("*.py"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _pipeline(folder: Path, settings: dict[str, Any], *, trusted: bool) -> Any:
    """The model with its tokenizer, on the CPU, as MLflow's flavor for transformers wants it."""
    import transformers

    arguments = custom_code.load_from(folder, trusted=trusted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, settings["kind"]).from_pretrained(
            **arguments, **dtype_argument("auto")
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(**arguments)
        model.name_or_path = tokenizer.name_or_path = str(folder)
        task = _TEXT if settings["task"] == served.CHAT else settings["task"]
        return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


def _signature(settings: dict[str, Any]) -> Any:
    """What goes in and comes out; Unity Catalog asks for both."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA

    if settings["task"] == served.CHAT:
        return ModelSignature(inputs=CHAT_MODEL_INPUT_SCHEMA, outputs=CHAT_MODEL_OUTPUT_SCHEMA)
    text = Schema([ColSpec("string")])
    if settings["task"] == served.FILL_MASK:
        return ModelSignature(inputs=text, outputs=text)
    types = {"max_tokens": "long", "temperature": "double"}
    params = ParamSchema(
        [ParamSpec(name, types[name], value) for name, value in settings["defaults"].items()]
    )
    return ModelSignature(inputs=text, outputs=text, params=params)


def _example(plan: RunPlan, task: str, tokenizer: Any) -> Any:
    """An input: the first of ``train.sample_prompts``, where that is of the right kind."""
    if task == served.FILL_MASK:
        return f"The answer is {tokenizer.mask_token}."
    prompts = plan.config.train.model_dump(mode="json")["sample_prompts"]
    first = prompts[0] if prompts else "What is the answer?"
    if task == served.CHAT:
        turns = [{"role": "user", "content": first}] if isinstance(first, str) else first
        return {"messages": turns, "max_tokens": 64}
    return first if isinstance(first, str) else "The answer is"


def _defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """What holds for an answer where a request does not say it: as the model's generation
    configuration has it, else the likeliest tokens."""
    sampled = float(generation.get("temperature") or 1.0) if generation.get("do_sample") else 0.0
    return {"max_tokens": generation.get("max_new_tokens") or MAX_TOKENS, "temperature": sampled}


def _card(lineage: dict[str, str]) -> str:
    """A model card: where the model comes from."""
    lines = [f"- {key.removeprefix(TAG)}: {value}" for key, value in lineage.items()]
    head = ["---", "library_name: transformers", "---", "Trained with dbx_llmtrain.", ""]
    return "\n".join([*head, *lines, ""])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content
