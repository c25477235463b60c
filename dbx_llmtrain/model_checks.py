"""Faults between the fields of ``model``, ``parallel`` and ``train``: combinations that no cluster
could run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from dbx_llmtrain import addresses, lora_fields, optimizers, zero_config
from dbx_llmtrain.errors import Problem

_ROLES = ("system", "user", "assistant", "tool")


def model_problems(model: Any) -> list[Problem]:
    """Faults within ``model``."""
    return [*_source(model), *_adapters(model)]


def parallel_problems(sections: Mapping[str, Any]) -> list[Problem]:
    """Faults within ``parallel``, and of it with the other sections that are valid themselves."""
    parallel = sections.get("parallel")
    if parallel is None:
        return []
    return [
        *_processes(parallel, sections.get("cluster")),
        *_optimizer(parallel, sections.get("train")),
        *_four_bit(parallel, sections.get("model")),
        *_fsdp(parallel),
        *_deepspeed(parallel, sections),
    ]


def _source(model: Any) -> list[Problem]:
    """Where the model comes from."""
    problems = _tokens(model.new_tokens)
    if model.source.startswith(addresses.REGISTRY):
        return [*problems, *_registered(model)]
    if model.source.strip():
        return problems
    if "source" in model.model_fields_set:
        problems.append(
            Problem("model.source", "is empty: expected a hub id, a folder or a .gguf file")
        )
        return problems
    if not model.config:
        return [*problems, Problem("model.source", "missing: it has no default")]
    if model.init != "random":
        problems.append(
            Problem(
                "model.init",
                "a model that model.config defines has no weights: set model.init=random, or give "
                "model.source",
            )
        )
    tokenizer = model.tokenizer
    if not (tokenizer if isinstance(tokenizer, str) else tokenizer and tokenizer.source):
        problems.append(
            Problem("model.tokenizer", "missing: a model that model.config defines has none")
        )
    return problems


def _registered(model: Any) -> list[Problem]:
    """A version in MLflow's registry."""
    problems = []
    if addresses.registered(model.source) is None:
        message = (
            "expected models:/NAME@ALIAS or models:/NAME/VERSION (NAME is catalog.schema.model in "
            f"Unity Catalog, VERSION a number), found {model.source[:120]!r}"
        )
        problems.append(Problem("model.source", message))
    if model.revision is not None:
        message = "is for models of the hub: a registered model's version or alias is in its source"
        problems.append(Problem("model.revision", message))
    return problems


def _tokens(tokens: Sequence[str]) -> list[Problem]:
    """Tokens to add that are none, or given twice."""
    problems = []
    if not all(token.strip() for token in tokens):
        problems.append(Problem("model.new_tokens", "has an empty token"))
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if twice:
        problems.append(Problem("model.new_tokens", f"has {', '.join(twice)} more than once"))
    return problems


def _adapters(model: Any) -> list[Problem]:
    """LoRA and 4-bit weights."""
    problems = [] if model.lora is None else lora_fields.problems(model.lora)
    if model.load_in_4bit and model.lora is None:
        problems.append(
            Problem(
                "model.load_in_4bit",
                "weights in 4 bits cannot be trained: train adapters over them with model.lora "
                "(model.lora={} takes the defaults), or set it to false",
            )
        )
    if model.load_in_4bit and model.init == "random":
        problems.append(
            Problem(
                "model.load_in_4bit",
                "expected false with model.init: random, which has no weights to keep in 4 bits",
            )
        )
    return problems


def _four_bit(parallel: Any, model: Any) -> list[Problem]:
    """4-bit weights under a strategy that cuts them up."""
    if model is None or not model.load_in_4bit or parallel.kind not in ("fsdp", "deepspeed"):
        return []
    return [
        Problem(
            "model.load_in_4bit",
            f"is not available yet with parallel.kind: {parallel.kind}: use single or ddp, or set "
            "it to false",
        )
    ]


def _fsdp(parallel: Any) -> list[Problem]:
    """Options of FSDP beside another strategy."""
    if parallel.kind in ("auto", "fsdp"):
        return []
    given = {"shard": parallel.shard != "full", "cpu_offload": parallel.cpu_offload}
    instead = " (DeepSpeed: parallel.offload_optimizer)" if parallel.kind == "deepspeed" else ""
    return [
        Problem(
            f"parallel.{name}",
            f"is an option of fsdp, but parallel.kind is {parallel.kind}: set parallel.kind=fsdp, "
            f"or leave it out{instead if name == 'cpu_offload' else ''}",
        )
        for name, wanted in given.items()
        if wanted
    ]


def _deepspeed(parallel: Any, sections: Mapping[str, Any]) -> list[Problem]:
    """Options of DeepSpeed beside another strategy, and those that contradict each other."""
    if parallel.kind != "deepspeed":
        return _only_deepspeed(parallel)
    problems = _stages(parallel)
    train = sections.get("train")
    if train is not None and train.precision == "fp16":
        problems.append(
            Problem(
                "train.precision",
                "fp16 is not offered with parallel.kind: deepspeed: use bf16, fp32 or auto, or "
                "parallel.kind=fsdp",
            )
        )
    own = parallel.config
    if isinstance(own, dict):
        problems += zero_config.refusals(zero_config.read(own), _known(parallel, train))
    if train is not None and parallel.offload_optimizer != "none":
        problems += _offloaded(parallel, train)
    return problems + _nvme(parallel, sections.get("cluster"))


def _only_deepspeed(parallel: Any) -> list[Problem]:
    """DeepSpeed's fields, set where it does not run."""
    unset = {"stage": None, "offload_optimizer": "none", "offload_params": "none"}
    unset |= {"nvme_dir": None, "config": None}
    return [
        Problem(
            f"parallel.{name}",
            f"is DeepSpeed's, but parallel.kind is {parallel.kind}: set parallel.kind=deepspeed, "
            "or remove it",
        )
        for name, default in unset.items()
        if getattr(parallel, name) != default
    ]


def _stages(parallel: Any) -> list[Problem]:
    """What only stage 3 can do."""
    if zero_config.stage_of(parallel) == 3:
        return []
    needs = "parallel.stage=3 (the default with it)"
    problems = []
    if parallel.offload_params != "none":
        message = f"parameters are cut in stage 3 only, found stage {parallel.stage}: set {needs}"
        problems.append(Problem("parallel.offload_params", message))
    if parallel.offload_optimizer == "nvme":
        message = (
            f"stages 1 and 2 offload to the CPU only, found stage {parallel.stage}: set {needs}"
        )
        problems.append(Problem("parallel.offload_optimizer", message))
    return problems


def _known(parallel: Any, train: Any) -> dict[str, Any]:
    """Of DeepSpeed's configuration what is decided before there is a plan."""
    zero: dict[str, Any] = {"stage": zero_config.stage_of(parallel)}
    for key, where in (
        ("offload_optimizer", parallel.offload_optimizer),
        ("offload_param", parallel.offload_params),
    ):
        zero[key] = {"device": where}
    known: dict[str, Any] = {"zero_optimization": zero, "gradient_accumulation_steps": 1}
    if train is not None:
        known["gradient_clipping"] = train.max_grad_norm
        if train.precision != "auto":
            known["bf16"] = {"enabled": train.precision == "bf16"}
    return known


def _offloaded(parallel: Any, train: Any) -> list[Problem]:
    """The optimizer of an offloaded state is DeepSpeed's AdamW, unless torch's is asked for."""
    own = parallel.config if isinstance(parallel.config, dict) else {}
    if not zero_config.needs_cpu_adam(parallel, own):
        return []
    path, instead = (
        "train.optimizer",
        f"parallel.config={{{zero_config.CPU_ADAM}: false}} has torch's",
    )
    if optimizers.name_of(train.optimizer) != "adamw":
        name = optimizers.name_of(train.optimizer)
        return [
            Problem(path, f"expected adamw with an offloaded optimizer, found {name}: {instead}")
        ]
    if optimizers.options_of(train.optimizer).get("amsgrad"):
        return [Problem(path, f"DeepSpeed's AdamW for the CPU has no amsgrad: {instead}")]
    return []


def _nvme(parallel: Any, cluster: Any) -> list[Problem]:
    """The folder for what is offloaded to disk."""
    if parallel.nvme_dir is None:
        return []
    path = "parallel.nvme_dir"
    if not zero_config.uses_nvme(parallel):
        return [Problem(path, "nothing is offloaded to nvme: set parallel.offload_optimizer=nvme")]
    local = getattr(cluster, "local_dir", None)
    folder = PurePosixPath(parallel.nvme_dir)
    if not folder.is_absolute() or ".." in folder.parts:
        return [Problem(path, f"expected an absolute path, found {parallel.nvme_dir}")]
    if local is None or not folder.is_relative_to(local):
        found = f"cluster.local_dir is {local}" if local else "cluster.local_dir is not set"
        message = f"expected a folder within cluster.local_dir, found {folder}, but {found}"
        return [Problem(path, message)]
    return []


def train_problems(train: Any) -> list[Problem]:
    """Faults within ``train``."""
    problems = []
    if train.epochs is not None and train.max_steps is not None:
        problems.append(
            Problem(
                "train.max_steps",
                f"{train.max_steps} steps and train.epochs={train.epochs:g} contradict each other: "
                "give one of them (train.epochs=null takes the epochs back)",
            )
        )
    if train.warmup >= 1 and train.warmup != int(train.warmup):
        problems.append(
            Problem(
                "train.warmup",
                f"expected whole steps, or a share below 1, found {train.warmup}",
            )
        )
    if train.min_learning_rate > train.learning_rate:
        problems.append(
            Problem(
                "train.min_learning_rate",
                f"expected at most train.learning_rate ({train.learning_rate}), found "
                f"{train.min_learning_rate}",
            )
        )
    problems += [*_max_time(train), *_sample_prompts(train)]
    return problems + _decay(train) + optimizers.problems(train)


def _max_time(train: Any) -> list[Problem]:
    if train.max_time is None:
        return []
    parts = [int(part) for part in train.max_time.split(":")]
    if any(parts) and parts[1] < 24:
        return []
    return [
        Problem(
            "train.max_time",
            "expected DD:HH:MM:SS of more than 0 seconds and less than 24 hours beside the days, "
            f"found {train.max_time!r}",
        )
    ]


def _sample_prompts(train: Any) -> list[Problem]:
    """Messages that are none, or that no answer follows."""
    problems = []
    for number, prompt in enumerate(train.sample_prompts):
        path = f"train.sample_prompts.{number}"
        if isinstance(prompt, str):
            if not prompt.strip():
                problems.append(Problem(path, "is empty: expected a text or a list of messages"))
            continue
        wrong = next((m for m in prompt if set(m) != {"role", "content"}), None)
        roles = [message.get("role") for message in prompt]
        if not prompt or wrong is not None:
            keys = ", ".join(sorted(wrong or ())) or "nothing"
            found = f", found one with {keys}" if prompt else ""
            message = f"expected messages with role and content{found}"
            problems.append(Problem(path, message))
        elif unknown := [role for role in roles if role not in _ROLES]:
            message = f"expected the roles {', '.join(_ROLES)}, found {unknown[0]!r}"
            problems.append(Problem(path, message))
        elif roles[-1] == "assistant":
            message = "ends with an answer: the model is to give it. Remove the last message"
            problems.append(Problem(path, message))
    return problems


def _decay(train: Any) -> list[Problem]:
    """What a constant learning rate has no use for."""
    if train.schedule != "constant":
        return []
    return [
        Problem(
            f"train.{name}",
            "has no effect with train.schedule: constant, whose rate never falls: remove it, or "
            "use cosine, linear or wsd",
        )
        for name, given in (
            ("decay_steps", train.decay_steps is not None),
            ("min_learning_rate", train.min_learning_rate > 0),
        )
        if given
    ]


def _optimizer(parallel: Any, train: Any) -> list[Problem]:
    """An optimizer that the strategy cannot run."""
    if train is None or parallel.kind == "auto":
        return []
    return optimizers.strategy_problems(train, parallel.kind)


def _processes(parallel: Any, cluster: Any) -> list[Problem]:
    """``single`` on several ranks."""
    if cluster is None:
        return []
    if parallel.kind == "single" and cluster.processes not in ("auto", 1):
        return [
            Problem(
                "parallel.kind",
                f"single runs one process, but cluster.processes is {cluster.processes}: use ddp "
                "or fsdp, or cluster.processes=1",
            )
        ]
    return []
