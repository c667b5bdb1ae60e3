"""Each rank reads only its own experts from disk, for any placement.

The concrete Transformers class is subclassed for the time of loading, in two places: its constructor runs on the meta
device, where the experts are cut to the rank's number, and its checkpoint reader gets lazy tensors that pack the rank's
experts as they are read. Everything else of ``from_pretrained`` is Transformers' own.

Letters: ``E`` experts per layer, ``n`` experts of this rank in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cap_hf.families import MoEFamily

__all__ = ["experts_module", "own_shard_class", "set_expert_parameters"]


class _PackedExperts:
    """Lazy packed parameter (n, rows, columns): ``[...]`` reads the rank's experts into one buffer."""

    def __init__(self, experts: Sequence[Sequence[Any]], dtype: torch.dtype) -> None:
        self.experts, self.dtype = experts, dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows = [part.get_shape()[0] for part in self.experts[0]]
        packed = torch.empty((len(self.experts), sum(rows), self.experts[0][0].get_shape()[1]), dtype=self.dtype)
        for target, parts in zip(packed, self.experts, strict=True):
            for piece, part in zip(torch.split(target, rows), parts, strict=True):
                piece.copy_(part[:])
        return packed[index]


class _ChosenExperts:
    """Lazy packed parameter (n, ...) cut out of a checkpoint's packed (E, ...)."""

    def __init__(self, tensor: Any, experts: Sequence[int], dtype: torch.dtype) -> None:
        self.tensor, self.experts, self.dtype = tensor, experts, dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape = self.tensor.get_shape()
        packed = torch.empty((len(self.experts), *shape[1:]), dtype=self.dtype)
        for target, expert in zip(packed, self.experts, strict=True):
            target.copy_(self.tensor[expert : expert + 1][0])
        return packed[index]


def experts_module(model: nn.Module, family: MoEFamily, layer_id: int) -> Any:
    """The experts of decoder layer ``layer_id``."""
    return model.get_submodule(family.experts_path(layer_id))


def set_expert_parameters(experts: Any, parameters: Mapping[str, torch.Tensor]) -> None:
    """Replace the packed parameters, each (n, rows, columns), and the module's own count with them."""
    for name, value in parameters.items():
        old = getattr(experts, name)
        setattr(experts, name, nn.Parameter(value, requires_grad=old.requires_grad))
        experts.num_experts = len(value)


def _shrink(model: nn.Module, family: MoEFamily, owned: Mapping[int, Sequence[int]]) -> None:
    for layer_id, experts in owned.items():
        module = experts_module(model, family, layer_id)
        shapes = {name: getattr(module, name) for name in family.packed_parameters}
        set_expert_parameters(module, {name: old.new_empty((len(experts), *old.shape[1:])) for name, old in shapes.items()})


def _own_state_dict(tensors: dict[str, Any], family: MoEFamily, owned: Mapping[int, Sequence[int]], dtype: torch.dtype) -> dict[str, Any]:
    """Replace every expert entry by lazy packed ones of this rank's experts; the rest stays as it is."""
    own: dict[str, Any] = {}
    prefixes = tuple(f"{family.experts_path(layer_id)}." for layer_id in owned)
    for layer_id, experts in owned.items():
        prefix = family.experts_path(layer_id)
        for packed, parts in family.packed_parameters.items():
            name = f"{prefix}.{packed}"
            if not experts:
                continue  # an empty parameter has nothing to read; it is made on the spot below
            if name in tensors:
                own[name] = _ChosenExperts(tensors[name], experts, dtype)
                continue
            try:
                own[name] = _PackedExperts([[tensors[f"{prefix}.{expert}.{part}.weight"] for part in parts] for expert in experts], dtype)
            except KeyError as error:
                raise ValueError(f"the checkpoint lacks {error.args[0]}; it is truncated or not a {family.model_type}") from error
    return own | {key: value for key, value in tensors.items() if not key.startswith(prefixes)}


def _open_all(files: Sequence[str]) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Any] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(
                f"checkpoint file {Path(file).name} is not safetensors; own-shard loading reads only that: convert the checkpoint first"
            )
        try:
            handle = safe_open(file, framework="pt")
            tensors.update({key: handle.get_slice(key) for key in list(handle.keys())})  # a slice keeps its file open
        except (SafetensorError, OSError) as error:
            raise ValueError(f"checkpoint file {file} is truncated or not safetensors ({error}); fetch it again") from error
    return tensors


def own_shard_class(model_class: Any, family: MoEFamily, owned: Mapping[int, Sequence[int]]) -> Any:
    """A subclass of ``model_class`` whose ``from_pretrained`` builds and reads only some experts.

    Args:
        model_class: concrete Transformers causal LM class.
        family: its registry entry.
        owned: decoder layer index -> ids of the experts to load, ascending.
    """

    class OwnShard(model_class):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _shrink(self, family, owned)

        @staticmethod
        def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
            if load_config.hf_quantizer is not None:
                raise ValueError("quantised checkpoints cannot be served by the experts hook; load one in bf16, fp16 or fp32")
            tensors = _open_all(checkpoint_files) if state_dict is None else state_dict
            own = _own_state_dict(tensors, family, owned, load_config.dtype)
            for layer_id, experts in owned.items():
                if not experts:
                    module = experts_module(model, family, layer_id)
                    empty = {
                        name: getattr(module, name).new_empty(getattr(module, name).shape, device="cpu")
                        for name in family.packed_parameters
                    }
                    set_expert_parameters(module, empty)
                    own |= {f"{family.experts_path(layer_id)}.{name}": value for name, value in empty.items()}
            load: Callable[..., Any] = model_class._load_pretrained_model
            return load(model, own, checkpoint_files, load_config, *args, **kwargs)

    OwnShard.__name__, OwnShard.__qualname__ = model_class.__name__, model_class.__qualname__
    return OwnShard
