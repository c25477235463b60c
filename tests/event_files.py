"""What TensorBoard reads in a folder of event files."""

from __future__ import annotations

from pathlib import Path


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Every series: steps, values, wall times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(item.step, item.value, item.wall_time) for item in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }
