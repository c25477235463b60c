"""Every exception that the package raises on purpose.

::

    LlmTrainError
    |-- ConfigError (also ValueError)   a wrong configuration; ``.problems`` has every fault
    |-- ClusterError                    the cluster cannot run it; ``.findings`` lists every reason
    |-- StagingError                    a node lacks its files; ``.nodes`` says which and why
    |-- DataError                       the data cannot be trained on
    |-- CheckpointError                 a checkpoint cannot be written, read or trusted
    |-- TrainingFailed                  a rank failed; says which one, where, at which step and why
    |-- RegistryError                   a model cannot be logged to MLflow or registered
    `-- SubmitError                     a job could not be submitted or followed
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Cause = Literal[
    "",
    "out_of_memory",
    "host_memory",
    "configuration",
    "stopped",
    "lost",
    "network",
    "stalled",
    "disk_full",
    "crash",
    "import",
    "permission",
    "credentials",
    "data",
    "model_mismatch",
]
"""What a training failed of; empty where that is not known. ``worker.failures`` has the table."""


class LlmTrainError(Exception):
    """Base of every error of this package."""


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration.

    ``path`` is the dotted path of the field (``train.learning_rate``), ``message`` says what was
    expected, what was found and what to do.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(LlmTrainError, ValueError):
    """The configuration is wrong. All its faults are reported at once, in ``problems``."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{head} in the configuration:\n{lines}")


@dataclass(frozen=True)
class Finding:
    """One result of a check of the cluster: ``level`` is ``ok``, ``warning`` or ``error``."""

    level: str
    check: str
    message: str

    def __str__(self) -> str:
        return f"[{self.level}] {self.check}: {self.message}"


class ClusterError(LlmTrainError):
    """The cluster cannot run what was asked. Every reason is in ``findings``."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings: tuple[Finding, ...] = tuple(findings)
        lines = "\n".join(f"  - {finding}" for finding in self.findings)
        super().__init__(f"the cluster cannot run this:\n{lines}")


class StagingError(LlmTrainError):
    """Some nodes could not get the model or the data. ``nodes`` maps each node to its cause."""

    def __init__(self, what: str, nodes: Mapping[str, str]) -> None:
        self.nodes: dict[str, str] = dict(nodes)
        lines = "\n".join(f"  - {node}: {cause}" for node, cause in sorted(self.nodes.items()))
        super().__init__(f"{what} could not be staged on {len(self.nodes)} node(s):\n{lines}")


class DataError(LlmTrainError):
    """The data cannot be read, is not of a known shape, or leaves nothing to train on.

    ``problems`` has one for every source that is at fault, where that is known.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(message)


class CheckpointError(LlmTrainError):
    """A checkpoint or an export cannot be written, read back or trusted.

    ``damaged``: what lies there is not what was written, so that an older one may do instead.
    """

    def __init__(self, message: str, *, damaged: bool = False) -> None:
        self.damaged = damaged
        super().__init__(message)


class RegistryError(LlmTrainError):
    """A run or its model cannot be logged to MLflow, or the model not be registered."""


class SubmitError(LlmTrainError):
    """A Databricks job could not be submitted, followed or read."""


class TrainingFailed(LlmTrainError):
    """A rank failed. The first one to fail is described; the others only followed it.

    Attributes: ``rank``, ``host``, ``gpu`` (uuid or index, ``None`` on CPU), ``step`` (optimizer
    steps finished), ``exit_code`` (negative: the signal that ended the process), ``traceback``,
    ``log_tail`` (last lines that the rank printed), ``log`` (the file with all of them), ``advice``
    (what to do, where known) and ``cause``, one of ``Cause``: such as ``out_of_memory``,
    ``disk_full``, ``network``; ``configuration`` where every rank found a ``ConfigError``, whose
    words say it all, so that the text leaves the traceback out; or ``stopped`` where no rank failed
    and the run ended because it was asked to. A notebook shows the text alone: the driver's own
    frames say nothing about it.
    """

    STOPPED: ClassVar[Cause] = "stopped"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        gpu: str | None = None,
        step: int | None = None,
        exit_code: int | None = None,
        traceback: str = "",
        log_tail: str = "",
        advice: str = "",
        cause: Cause = "",
        log: str = "",
    ) -> None:
        self.message = message
        self.rank = rank
        self.host = host
        self.gpu = gpu
        self.step = step
        self.exit_code = exit_code
        self.traceback = traceback
        self.log_tail = log_tail
        self.advice = advice
        self.cause: Cause = cause
        self.log = log
        super().__init__(self._text())

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of the stack of the driver's own frames."""
        return f"{type(self).__name__}: {self}".splitlines()

    def _text(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"on {self.host}"] if self.host else []
        where += [f"GPU {self.gpu}"] if self.gpu else []
        where += [f"at step {self.step}"] if self.step is not None else []
        where += [f"exit code {self.exit_code}"] if self.exit_code is not None else []
        if self.cause == self.STOPPED:
            where = []
        parts = [f"training failed: {', '.join(where)}: {self.message}" if where else self.message]
        told = self.cause == "configuration"
        if self.traceback and not told:
            parts.append(f"Traceback of the rank:\n{self.traceback.rstrip()}")
        elif self.log_tail and not told:
            parts.append(f"Last lines of the rank:\n{self.log_tail.rstrip()}")
        if self.log and not told:
            parts.append(f"The whole log of the rank: {self.log}")
        if self.advice:
            parts.append(f"What to do: {self.advice}")
        return "\n\n".join(parts)


def was_stopped(error: BaseException) -> bool:
    """Whether a run ended because somebody wanted it to, and not of a fault."""
    if isinstance(error, TrainingFailed):
        return error.cause == TrainingFailed.STOPPED
    return isinstance(error, KeyboardInterrupt | SystemExit)


def together(found: Sequence[LlmTrainError]) -> LlmTrainError:
    """One error for several that were found at once: a single one as it is, a ``ClusterError``
    where all are about the cluster, else a ``ConfigError`` with the problems of them all."""
    if len(found) == 1:
        return found[0]
    findings = [error.findings for error in found if isinstance(error, ClusterError)]
    if len(findings) == len(found):
        return ClusterError([finding for some in findings for finding in some])
    return ConfigError(list(dict.fromkeys(item for error in found for item in _problems(error))))


def _problems(error: LlmTrainError) -> Sequence[Problem]:
    """An error in the form of problems with a path."""
    if isinstance(error, ConfigError | DataError) and error.problems:
        return error.problems
    if isinstance(error, ClusterError):
        return [
            Problem(_SETTING.get(finding.check, f"cluster ({finding.check})"), finding.message)
            for finding in error.findings
            if finding.level == "error"
        ]
    path, _, rest = str(error).partition(": ")
    return [Problem(path, rest) if _PATH.fullmatch(path) else Problem("", str(error))]


_PATH = re.compile(r"[a-z_]+(\.[\w-]+)+")
_SETTING = {name: "cluster.processes" for name in ("task slots", "process slots", "GPUs")}
