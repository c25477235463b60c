"""What travels where ranks run a function of the user's own: data only."""

from __future__ import annotations

from dbx_llmtrain.records import Artifact, FileEntry, LaunchPlan
from dbx_llmtrain.reports import Record


class Given(Record):
    """A file or folder that every node gets a copy of. ``name``: that of the file, empty for a
    folder."""

    artifact: Artifact
    name: str = ""


class CallPlan(LaunchPlan):
    """A function that every rank calls: ``call`` is the file in the run folder that it is pickled
    into with its arguments, by value, and that file's hash; ``stage`` what it gets copies of."""

    call: FileEntry
    stage: tuple[Given, ...] = ()


def artifacts(plan: CallPlan) -> list[Artifact]:
    """What nodes get copies of, each content once."""
    return list({given.artifact.fingerprint: given.artifact for given in plan.stage}.values())
