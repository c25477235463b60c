"""What a rank works on: everything that is set up once, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.text.prepared import Split
from dbx_llmtrain.worker import kernels
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.folders import Folders
from dbx_llmtrain.worker.laps import Laps
from dbx_llmtrain.worker.loop import Window
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.masking import Masking, make_masking
from dbx_llmtrain.worker.model import check_same_weights, load_tokenizer
from dbx_llmtrain.worker.parallel import Strategy, make_strategy
from dbx_llmtrain.worker.probe import ProbeResult, probe
from dbx_llmtrain.worker.reporting import Reporter
from dbx_llmtrain.worker.weights import Fill
from dbx_llmtrain.worker.world import World

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Job:
    """Everything that stays the same from the first step to the last."""

    plan: RunPlan
    world: World
    folders: Folders
    model: nn.Module
    root: nn.Module
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    order: Order
    held_out: Mapping[str, Split]
    """Splits to evaluate, by name: ``eval`` or ``eval-<name>``, and ``test``."""
    probe: ProbeResult
    reporter: Reporter


@dataclass
class Attempt:
    """What a checkpoint does not keep: how this attempt goes, and how it ends."""

    saved: Path | None = None
    """The checkpoint that was completed last, or resumed from."""
    begun: Path | None = None
    """The one that was begun last."""
    timed: bool = False
    """Whether it has measured ``seconds_to_first_step``."""
    stop_reason: str = ""
    """Why no more steps are taken although the last one has not been reached."""
    cut: bool = False
    """The run is left where it is: nothing is evaluated or exported."""
    laps: Laps = field(default_factory=Laps)
    """The ranks' own times since the last report."""
    anew: bool = False
    """It goes on from a checkpoint that was judged by other rows, or by another run: it is judged
    anew from there on."""


@dataclass
class Progress:
    """How far the run is; goes into every checkpoint, so that a resumed run reports the whole.

    ``seen`` sums over all steps (the loss of those that were skipped for not being finite is left
    out), ``window`` over those since the last report. The same on every rank, but for times.
    """

    step: int = 0
    seen: Window = field(default_factory=Window)
    window: Window = field(default_factory=Window)
    initial_eval_loss: float | None = None
    eval_loss: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    """Last losses and perplexities of the splits with a name (``eval_<name>_loss``, ``test_loss``),
    and the user's own metrics."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of the last evaluation, which was after step ``evaluated`` (-1: there was none)."""
    evaluated: int = -1
    bests: list[tuple[int, float]] = field(default_factory=list)
    """Step and ``checkpoint.metric`` of the evaluations that ``keep_best`` keeps, best first."""
    judged_by: str = ""
    """That metric, and which way it is better."""
    reached: float | None = None
    """The best value by which early stopping measures, and how many evaluations were ``waited``
    for a better one since."""
    waited: int = 0
    seconds_to_first_step: float | None = None
    now: Attempt = field(default_factory=Attempt)

    def judge_anew(self) -> None:
        """Forget every evaluation, and what was decided by them: they cannot be compared with those
        to come."""
        self.initial_eval_loss, self.eval_loss, self.evaluated = None, None, -1
        self.losses, self.metrics, self.bests = {}, {}, []
        self.judged_by, self.reached, self.waited = "", None, 0
        self.now.anew = True

    def leave_times(self) -> None:
        """Forget how long the steps so far have taken: another run has taken them."""
        self.seen.seconds, self.seen.untimed = 0.0, self.seen.tokens
        self.window, self.seconds_to_first_step = Window(), None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        state = asdict(self)
        del state["now"]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any], saved: Path) -> Progress:
        """The progress that a checkpoint keeps."""
        windows = {name: Window(**state[name]) for name in ("seen", "window")}
        bests = [(int(step), float(value)) for step, value in state["bests"]]
        return cls(**(state | windows | {"bests": bests}), now=Attempt(saved=saved))


def set_up(
    plan: RunPlan,
    world: World,
    model: nn.Module,
    fill: Fill,
    folders: Folders,
    reporter: Reporter,
) -> Job:
    """Wrap the model, ``fill`` it, build what trains it, and prove on it that the loss is right.

    Raises ``ClusterError`` where the launcher started another number of ranks than planned.
    """
    if world.size != plan.world_size:
        message = f"the plan is for {plan.world_size} ranks, the launcher started {world.size}"
        raise ClusterError([Finding("error", "launcher", message)])
    train, data = plan.config.train, plan.config.data
    module = LossModule(model, masked=data.objective == "mlm")
    strategy = make_strategy(
        plan.strategy, world, plan.precision, parallel=plan.parallel, train=train, plan=plan
    )
    root = strategy.wrap(module, fill)
    reporter.watch(root, model)
    check_same_weights(model, fill.digests)
    optimizer = strategy.build_optimizer(model, train)
    splits = {name: Split(folders.data, name) for name in plan.data.splits}
    longest = max(int(part.tokens.max(initial=1)) for part in splits.values())
    probed = probe(root, module, device=world.device, max_length=longest)
    order = Order(
        split=splits.pop("train"),
        seed=train.seed,
        global_batch=plan.global_batch_size,
        micro_batch=plan.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        padded=probed.padded,
        shuffle=data.shuffle,
        group_by_length=data.group_by_length,
        longest_first=plan.total_steps if plan.trial else data.longest_first,
        masking=_masking(plan, folders) if module.masked else None,
    )
    told = kernels.fuse(plan, world, root, model, order)
    probed = replace(probed, reasons=(*probed.reasons, *told))
    return Job(
        plan=plan,
        world=world,
        folders=folders,
        model=model,
        root=root,
        strategy=strategy,
        optimizer=optimizer,
        order=order,
        held_out=splits,
        probe=probed,
        reporter=reporter,
    )


def _masking(plan: RunPlan, folders: Folders) -> Masking:
    return make_masking(
        load_tokenizer(folders.model, trusted=plan.config.model.trust_remote_code),
        seed=plan.config.train.seed,
        probability=plan.config.data.mlm_probability,
        vocab_size=plan.model.vocab_size,
    )
