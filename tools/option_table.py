"""Write ``docs/options.md``: other trainers' option names and ours, from the table in the package.

python tools/option_table.py > docs/options.md
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dbx_llmtrain.config import field_paths
from dbx_llmtrain.model_sections import LoraConfig
from dbx_llmtrain.option_names import OPTIONS

HEAD = """\
# Option names of other trainers

Where an option of another trainer went, or why there is none. An unknown key of a configuration is
explained from the same table. *Later*: a field that this version refuses by name.
"""


def page() -> str:
    """The whole page, as Markdown."""
    live = {*field_paths(), *(f"model.lora.{name}" for name in LoraConfig.model_fields)}
    parts = [HEAD]
    for source, options in groupby(OPTIONS, key=lambda option: option.source):
        parts.append(f"\n## {source}\n\n| theirs | here | |\n|---|---|---|\n")
        for option in options:
            ours = f"`{option.ours}`" if option.ours else "none"
            if option.ours and option.ours not in live:
                ours += " (later)"
            parts.append(f"| `{option.name}` | {ours} | {option.note} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
