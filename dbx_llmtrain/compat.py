"""The only place that asks which version of a library is there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version


def installed(package: str) -> Version | None:
    """The installed version of a distribution, ``None`` when it is not installed, or not whole."""
    try:
        found = version(package)
    except (PackageNotFoundError, FileNotFoundError, TypeError):
        return None
    return Version(found) if found else None


def at_least(package: str, minimum: str) -> bool:
    """Whether ``package`` is installed in ``minimum`` or newer."""
    found = installed(package)
    return found is not None and found >= Version(minimum)


def dtype_argument(dtype: Any) -> dict[str, Any]:
    """The keyword of ``from_pretrained`` and ``from_config`` that sets the weights' type.

    It was ``torch_dtype`` until transformers 4.56, which renamed it to ``dtype``.
    """
    return {"dtype" if at_least("transformers", "4.56") else "torch_dtype": dtype}
