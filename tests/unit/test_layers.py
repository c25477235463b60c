"""Every module imports only layers below its own; the table is the architecture."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dbx_llmtrain

ROOT = Path(dbx_llmtrain.__file__).parent

# One layer a line, the lowest first. Modules of one layer do not know each other.
LAYERS = [
    line.split()
    for line in """
errors secret_text estimates zero_fields option_tables
addresses activations optimizers lora_fields zero_config
option_names option_values channel logs data_checks model_checks section_types yaml_text
config_checks model_sections overrides
sections credentials schedules
config
forecasts
reports
records
outcomes storage calls
display hardware events compat tracking_guard custom_code text.values memory
display_plan display_outcomes display_curves batches tracking_store text.readers text.pieces
live_state
layout display_live milestones resuming tracking_params tracking_sender tracking_trial
choosing tracking_courier
timing advice tracking_rank
planning tracking_run
tracking tracking_tensorboard text.turns text.lexer text.packing text.split
text.formats text.templates text.coding text.prompts
text.packs
text.prepared text.plain text.chat
text.encode
previewing
preview_parts
preview_text preview_html
worker.gpus worker.network worker.shared_folder worker.builds worker.output worker.locks
worker.failures worker.requests
worker.kills worker.frames worker.debugging
worker.stacks
worker.lifeline worker.room
worker.copies
worker.node worker.meeting worker.watch
worker.staged worker.handover
worker.caches worker.facts worker.world worker.whole worker.part worker.parts worker.weight_files
worker.folders worker.four_bit worker.pairs
worker.trainer worker.torchrun worker.usage
worker.lora worker.model worker.order worker.masking worker.masks worker.optim worker.router
worker.generation worker.adapters worker.initial worker.growth worker.weight_names
worker.weights worker.adapter_weights worker.reopened worker.generate
worker.data worker.laps worker.rng worker.metadata worker.snapshot worker.keeping
worker.loss
worker.probe worker.lending
worker.parallel worker.kernels worker.checkpoint worker.evaluate worker.samples worker.export
worker.writing
worker.saving
worker.loop worker.compute worker.tools worker.rebuild
worker.reporting worker.own_metrics worker.pace
worker.jobs
worker.evaluations worker.exports worker.judging worker.starting
worker.session worker.evaluating
worker.main worker.call
worker.supervisor shapes
driver.model_code
driver.shipping driver.preflight driver.node_checks driver.strategy_checks driver.model_files
driver.served
driver.rows driver.gguf driver.gguf_header driver.run_folder
driver.lease driver.uploading driver.job_context
driver.monitor driver.diagnosis driver.signals driver.progress_views driver.formatters
driver.exporting
driver.model_config driver.causes driver.model_changes driver.user_metrics
driver.html_view driver.board driver.stalls
driver.cluster driver.hub driver.registered driver.composed driver.kept driver.progress
driver.adapters
driver.checklist driver.showing driver.sources driver.tasks driver.tables driver.hub_data
driver.inputs driver.outlines driver.generating driver.recovery
driver.fingerprints driver.rules driver.counts
driver.prepare driver.examples driver.staging
driver.launch driver.supervise driver.forecasting
driver.results driver.survey driver.probing driver.trial driver.sample_prompts driver.model_package
driver.watching driver.calling driver.deciding driver.registry driver.running
driver.checks driver.evaluating
driver.sending
api api_results cli_session
cli_results
cli
__main__
""".strip().splitlines()
]
RANKS = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}

# Where a layer above is used inside a function, for the reason given.
EXCEPTIONS = {
    # A record shows itself; its page is made when somebody looks.
    ("records", "display"),
    ("reports", "display"),
    ("records", "display_plan"),
    ("records", "display_curves"),
    ("forecasts", "display_plan"),
    ("outcomes", "display_outcomes"),
    ("live_state", "display_live"),
    ("previewing", "preview_text"),
    ("previewing", "preview_html"),
}


def modules() -> list[str]:
    """Dotted names within the package; a sub-package of one layer counts as one module."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found.append(name.removesuffix(".__init__"))
    return [name for name in found if name not in ("__init__", "text", "worker", "driver")]


def home(module: str) -> str:
    """The table's entry for a module: ``worker.parallel.ddp`` is in ``worker.parallel``."""
    while module and module not in RANKS:
        module = module.rpartition(".")[0]
    return module


def imports(module: str) -> set[str]:
    """Every dotted name that a module imports anywhere in its code."""
    path = ROOT / (module.replace(".", "/") + ".py")
    path = path if path.exists() else ROOT / module.replace(".", "/") / "__init__.py"
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def wrong(module: str, imported: set[str]) -> list[str]:
    """The imports of our own modules that the table forbids."""
    mine = home(module)
    ours = {home(name.removeprefix("dbx_llmtrain.")) for name in imported if _is_ours(name)}
    return sorted(
        name
        for name in ours - {mine}
        if not name or (RANKS[name] >= RANKS[mine] and (mine, name) not in EXCEPTIONS)
    )


def _is_ours(name: str) -> bool:
    return name.startswith("dbx_llmtrain.")


def test_the_table_has_every_module() -> None:
    assert {home(module) for module in modules()} == set(RANKS)
    assert "" not in {home(module) for module in modules()}


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_lower_layers(module: str) -> None:
    assert not wrong(module, imports(module))


def test_the_rule_bites() -> None:
    assert wrong("worker.node", {"dbx_llmtrain.driver.cluster.probe"}) == ["driver.cluster"]
    assert wrong("storage", {"dbx_llmtrain.errors.DataError"}) == []
    assert wrong("worker.parallel.ddp", {"dbx_llmtrain.worker.parallel.single.X"}) == []
    assert wrong("config", {"dbx_llmtrain.no_such_module"}) == [""]


def users_of(library: str) -> set[str]:
    """Modules that import ``library`` (a dotted prefix)."""
    return {
        module
        for module in modules()
        if any(name == library or name.startswith(f"{library}.") for name in imports(module))
    }


def test_who_may_use_what() -> None:
    stores = {f"tracking{part}" for part in ("", "_store", "_sender", "_courier", "_run", "_trial")}
    logging = stores | {"driver.model_package", "driver.registered", "driver.registry"}
    assert users_of("mlflow") == logging
    assert users_of("pyspark.ml.torch") == {"driver.launch"}
    assert not {name for name in users_of("pyspark") if name.startswith(("worker", "text"))}
    on_driver = {name for name in users_of("torch") if name.startswith(("driver", "text"))}
    # One turns a .gguf file into a Hugging Face folder, one answers where a model is served.
    assert on_driver <= {"driver.gguf", "driver.served"}
