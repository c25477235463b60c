"""``python -m dbx_llmtrain.tracking_trial URI``: is MLflow reached from here, and is one let in?

The credentials are in the environment. One cheap question, no second try; exit code 0 when it was
answered, else the last line that is printed says why not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from dbx_llmtrain.tracking_store import reachable_from_workers

_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


def uri_for_workers(environ: Mapping[str, str]) -> str:
    """The store that rank 0 will log to itself, as far as it is known without importing MLflow;
    empty where there is none."""
    if "mlflow" in sys.modules:
        import mlflow

        uri = str(mlflow.get_tracking_uri()) if mlflow.is_tracking_uri_set() else ""
    else:
        uri = environ.get("MLFLOW_TRACKING_URI", "")
    if not uri and "DATABRICKS_RUNTIME_VERSION" in environ:
        uri = "databricks"
    return uri if reachable_from_workers(uri) else ""


def main(arguments: Sequence[str]) -> int:
    """Ask; raises what MLflow does."""
    os.environ.update(_PATIENCE)
    import mlflow

    (uri,) = arguments
    mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
