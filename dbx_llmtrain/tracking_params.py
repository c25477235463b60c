"""A run's configuration and plan as MLflow's parameters: dotted names, text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.tracking_store import KEY_CHARS


def flat_params(plan: RunPlan) -> dict[str, str]:
    """Configuration (defaults included) and plan. What is of one call only is left out."""
    config = plan.config.model_dump(mode="json")
    numbers = plan.model_dump(
        mode="json",
        exclude={
            *("config", "model", "data", "tracking", "decisions", "attempt"),
            *("began", "closing", "stop_after", "metrics", "resume_from", "strategies", "time"),
        },
    )
    model = plan.model.model_dump(mode="json", exclude={"artifact"})
    data = plan.data.model_dump(mode="json", exclude={"artifact", "audit", "sources"})
    for part, artifact in ((model, plan.model.artifact), (data, plan.data.artifact)):
        part.update(fingerprint=artifact.fingerprint, bytes=artifact.size)
    params: dict[str, str] = {}
    for name, section in config.items():
        params |= flatten(name, section)
    return params | flatten("plan", {**numbers, "model": model, "data": data})


def flatten(prefix: str, value: Any) -> dict[str, str]:
    """Nested mappings as dotted names that MLflow takes; ``None`` and empty ones are left out."""
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= flatten(f"{prefix}.{key}", item)
        return found
    if value is None or value == []:
        return {}
    text = value if isinstance(value, str) else json.dumps(value)
    return {re.sub(r"[^\w. -]", "_", prefix)[:KEY_CHARS]: text}
