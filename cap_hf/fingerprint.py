"""What tells one model from another: a hash of its weights, wherever they came from and however they are laid out."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from cap_hf.modeling import CAPMoEModel

__all__ = ["weights_fingerprint"]

_SAMPLED = 64  # entries of an expert's matrix


def weights_fingerprint(model: CAPMoEModel) -> str:
    """Hash of the weights, 16 hex digits, equal on all ranks and for any layout; every rank calls it.

    Of dense weights all bytes count, of each expert's the first ones: whatever trains or converts experts changes them too.
    """
    digest, samples = hashlib.sha256(), []
    paths = [model.family.experts_path(layer_id) for layer_id in model.layout.layer_ids.tolist()]
    for name, value in model.model.state_dict().items():
        if not name.startswith(tuple(f"{path}." for path in paths)):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(_bytes(value))
    for layer, path in enumerate(paths):
        hosted = range(model.layout.num_experts) if model.group.size == 1 else model.layout.experts_of(layer, model.group.rank).tolist()
        for name, parameter in model.model.get_submodule(path).named_parameters():
            rows = _bytes(parameter.flatten(1)[:, :_SAMPLED]).reshape(len(parameter), -1)
            samples += [[layer, name, expert, hashlib.sha256(row).hexdigest()[:16]] for expert, row in zip(hosted, rows, strict=True)]
    everywhere = sorted(sample for rank in model.group.gather_json(samples) for sample in rank)
    digest.update(json.dumps(everywhere).encode())
    return str(model.group.gather_json(digest.hexdigest())[0])[:16]


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
