"""Secrets: which ones the ranks need, and how to keep them out of everything that is written."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from dbx_llmtrain.secret_text import hide, is_secret_name

# Fewer characters would blot out ordinary words.
_SHORTEST = 4
_NAMES = (
    "DATABRICKS_HOST",
    "DATABRICKS_TOKEN",
    "DATABRICKS_CLIENT_ID",
    "DATABRICKS_CLIENT_SECRET",
    "DATABRICKS_USERNAME",
    "DATABRICKS_PASSWORD",
    "DATABRICKS_ACCOUNT_ID",
    "DATABRICKS_AUTH_TYPE",
    "DATABRICKS_INSECURE",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_INSECURE_TLS",
    "MLFLOW_TRACKING_AUTH",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
)


def collect(environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank needs to reach MLflow and the hub, from the driver's environment.

    A user name and password within ``MLFLOW_TRACKING_URI`` become variables of their own, so that
    the URI can be written down.
    """
    found = uri_credentials(environ.get("MLFLOW_TRACKING_URI", ""))
    return found | {name: environ[name] for name in _NAMES if environ.get(name)}


def uri_credentials(uri: str) -> dict[str, str]:
    """MLflow's variables for the user name and password within a URI, if it has any."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # no URI, as MLflow will say; this is asked for wherever secrets are hidden
        return {}
    found = {}
    if parts.username:
        found["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    if parts.password:
        found["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
    return found


def without_credentials(uri: str) -> str:
    """The URI without user name and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """``text`` with the value of every secret of ``secrets`` replaced by ``***``.

    Only values whose name says that they are secret count: a host or a user name stays readable.
    What looks like a secret by itself goes in any case (the user and password within a URI, tokens
    of the usual kinds), known as one or not.
    """
    values = {value for name, value in secrets.items() if is_secret_name(name)}
    values |= {quote(value, safe="") for value in values}
    text = hide(text)
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return text
