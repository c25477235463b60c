"""A rank that carries out several plans, one after the other, as ``dbx_llmtrain.worker.main`` does.

Arguments: folders, each with a ``plan-RANK.json``. What comes of a plan goes into its folder.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import run
from tests.dist.launch import TIMEOUT


def main() -> None:
    faulthandler.dump_traceback_later(TIMEOUT - 20, exit=True)
    rank = os.environ["RANK"]
    for number, name in enumerate(sys.argv[1:]):
        # torchrun's store keeps the keys of each attempt apart; every plan is one.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        folder = Path(name)
        plan = RunPlan.model_validate_json((folder / f"plan-{rank}.json").read_text())
        try:
            outcome = run(plan).model_dump()
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
