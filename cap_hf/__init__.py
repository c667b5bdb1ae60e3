"""cap_hf: communication-aware placement and pruning for expert-parallel inference of Mixture-of-Experts models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cap_hf.config import CAPConfig
from cap_hf.layout import ExpertLayout
from cap_hf.placement import PlacementSpectrum, Placer
from cap_hf.replicated import ReplicatedLayout
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

if TYPE_CHECKING:
    from cap_hf.modeling import CAPMoEModel
    from cap_hf.recorder import RoutingRecorder
    from cap_hf.trainer import CAPTrainer, CAPTrainingArguments

__version__ = "0.1.0"

_LAZY = {  # these import torch and transformers
    "CAPMoEModel": "cap_hf.modeling",
    "CAPTrainer": "cap_hf.trainer",
    "CAPTrainingArguments": "cap_hf.trainer",
    "RoutingRecorder": "cap_hf.recorder",
}

__all__ = [
    "CAPConfig",
    "CAPMoEModel",
    "CAPTrainer",
    "CAPTrainingArguments",
    "ExpertLayout",
    "PlacementSpectrum",
    "Placer",
    "ReplicatedLayout",
    "RoutingRecorder",
    "RoutingTrace",
    "Topology",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'cap_hf' has no attribute {name!r}")
