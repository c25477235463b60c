"""What every section of a configuration is made of: the base class and the types of fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from dbx_llmtrain.errors import ConfigError, Problem


def _no_truth(value: Any) -> Any:
    """Python takes ``true`` for 1; in a configuration it is a slip."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


NOT_BOOL = BeforeValidator(_no_truth)
PositiveInt = Annotated[int, Field(gt=0), NOT_BOOL]
NonNegativeInt = Annotated[int, Field(ge=0), NOT_BOOL]
Positive = Annotated[float, Field(gt=0), NOT_BOOL]
NonNegative = Annotated[float, Field(ge=0), NOT_BOOL]
Share = Annotated[float, Field(gt=0, lt=1), NOT_BOOL]


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, docstrings are the field descriptions."""

    section: ClassVar[str] = ""
    """Its name in a configuration."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refused by a ``ConfigError`` that says how a setting is changed."""
        path = f"{self.section}.{name}" if self.section else name
        raise ConfigError(
            [Problem(path, f"a configuration is frozen: use cfg = cfg.override({f'{path}=...'!r})")]
        )
