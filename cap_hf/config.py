"""What a user sets: the layout, the pruning rule and its threshold."""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cap_hf._files import read_json, write_json
from cap_hf.layout import ExpertLayout

__all__ = ["CAPConfig"]

PRUNING_RULES = ("none", "expert", "device")
SOLVERS = ("greedy", "exact")
DISPATCHES = ("auto", "flat", "hierarchical")
WIRE_DTYPES = (None, "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class CAPConfig:
    """Options of ``CAPMoEModel.from_pretrained(..., cap_config=...)``.

    Raises:
        ValueError: an unknown choice, a threshold outside [0, 1), a threshold without a rule, or a time limit that is not positive.
    """

    layout: ExpertLayout | str | Path | None = None
    """Where experts live: a layout or the path of a saved one; None spreads them in id order over the ranks that run."""

    pruning: Literal["none", "expert", "device"] = "none"
    """"expert" drops a token's lowest-scored experts, "device" whole ranks whose experts matter least for their cost."""

    prune_threshold: float = 0.0
    """p in [0, 1): the share of a token's gate score that may be dropped in a layer; 0 changes nothing."""

    prune_solver: Literal["greedy", "exact"] = "greedy"
    """How device pruning picks ranks: the paper's greedy, or the cheapest set by enumeration (up to 12 experts per token)."""

    renormalize: bool = False
    """Scale surviving gate weights back to the token's own sum; measured worse on the embedded models at every p."""

    dispatch: Literal["auto", "flat", "hierarchical"] = "auto"
    """"hierarchical" sends a token to a node once and fans it out there, "flat" to each rank; "auto": by the layout's nodes."""

    wire_dtype: Literal["bfloat16", "float16"] | None = None
    """Type in which rows and results travel; None sends them as they are. Halves the traffic of a float32 model, at that precision."""

    timeout_s: float = 60.0
    """Seconds after which a rank that waits for another within or before a forward gives up, with an error that names it."""

    def __post_init__(self) -> None:
        choices = {"pruning": PRUNING_RULES, "prune_solver": SOLVERS, "dispatch": DISPATCHES, "wire_dtype": WIRE_DTYPES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(map(str, allowed))}")
        if not _is_number(self.timeout_s) or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is {self.timeout_s!r}; it must be a positive number of seconds")
        if not (self.layout is None or isinstance(self.layout, (ExpertLayout, str, Path))):
            raise ValueError(f"layout is a {type(self.layout).__name__}; give an ExpertLayout, the path of a saved one, or None")
        if not isinstance(self.renormalize, bool):
            raise ValueError(f"renormalize is {self.renormalize!r}; it must be True or False")
        threshold = self.prune_threshold
        if not _is_number(threshold) or not 0 <= threshold < 1:
            raise ValueError(
                f"prune_threshold is {self.prune_threshold!r}; it must be in [0, 1): 0 prunes nothing, 1 would drop every expert"
            )
        if self.pruning == "none" and threshold > 0:
            raise ValueError(
                f"prune_threshold is {threshold} but pruning is 'none'; set pruning='device' (or 'expert'), or the threshold to 0"
            )

    def load_layout(self) -> ExpertLayout | None:
        """The layout itself, read from its file where a path was given."""
        return ExpertLayout.load(self.layout) if isinstance(self.layout, (str, Path)) else self.layout

    def replace(self, **changes: Any) -> CAPConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def save(self, path: str | Path) -> None:
        """Write as JSON; a layout object is stored inside, a path as it is."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content["layout"] = self.layout.to_dict() if isinstance(self.layout, ExpertLayout) else self.layout and str(self.layout)
        write_json(path, "config", content)

    @classmethod
    def load(cls, path: str | Path) -> CAPConfig:
        """Read what ``save`` wrote; keys that this version does not know are named in a warning and dropped."""
        content = read_json(path, "config")
        unknown = sorted(set(content) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            warnings.warn(f"{path}: fields {', '.join(unknown)} are not known to this version of cap_hf and are ignored", stacklevel=2)
        known = {key: value for key, value in content.items() if key not in unknown}
        if isinstance(known.get("layout"), dict):
            known["layout"] = ExpertLayout.from_dict(known["layout"], str(path))
        try:
            return cls(**known)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
