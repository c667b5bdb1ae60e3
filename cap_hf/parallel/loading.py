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
from cap_hf.parallel.groups import ExpertGroup

__all__ = ["default_device_map", "experts_module", "own_shard_class", "set_expert_parameters"]


_QUANTISED_ENDINGS = ("_blocks", "_scales", ".weight_scale", ".weight_scale_inv", ".qweight", ".qzeros")  # mxfp4, fp8, GPTQ, AWQ


def _shape(tensor: Any) -> tuple[int, ...]:
    """Shape of a tensor or of a lazy safetensors slice."""
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


class _PackedExperts:
    """Lazy packed parameter (n, rows, columns): ``[...]`` reads the rank's experts into one buffer."""

    def __init__(self, tensors: Mapping[str, Any], keys: Sequence[Sequence[str]], shape: Sequence[int], dtype: torch.dtype) -> None:
        """``keys``: per expert, the checkpoint entries to stack row by row; ``shape`` (n, rows, columns) of the parameter."""
        self.tensors, self.keys, self.shape, self.dtype = tensors, keys, tuple(shape), dtype
        self.rows = self.shape[1] // len(keys[0])
        for key in (key for parts in keys for key in parts):
            if key not in tensors:
                raise ValueError(f"the checkpoint lacks {key}; it is truncated or of another model")
            if _shape(tensors[key]) != (self.rows, self.shape[2]):
                raise ValueError(f"{key} has shape {_shape(tensors[key])}, not {(self.rows, self.shape[2])}; the file is not of this model")

    def __getitem__(self, index: Any) -> torch.Tensor:
        packed = torch.empty(self.shape, dtype=self.dtype)
        for target, parts in zip(packed, self.keys, strict=True):
            for piece, key in zip(torch.split(target, self.rows), parts, strict=True):
                piece.copy_(self.tensors[key][:])
        return packed[index]


class _ChosenExperts:
    """Lazy packed parameter (n, ...) cut out of a checkpoint's packed (E, ...)."""

    def __init__(self, tensor: Any, key: str, experts: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> None:
        """``experts``: ids to read; ``shape`` (n, ...) of the parameter."""
        self.tensor, self.experts, self.dtype = tensor, experts, dtype
        found = _shape(tensor)
        if found[1:] != tuple(shape)[1:] or found[0] <= max(experts):
            wanted = (f"{max(experts) + 1} or more", *shape[1:])
            raise ValueError(f"{key} has shape {found}, not ({', '.join(map(str, wanted))}); the file is not of this model")

    def __getitem__(self, index: Any) -> torch.Tensor:
        packed = torch.empty((len(self.experts), *_shape(self.tensor)[1:]), dtype=self.dtype)
        for target, expert in zip(packed, self.experts, strict=True):
            target.copy_(self.tensor[expert : expert + 1][0])
        return packed[index]


def default_device_map(group: ExpertGroup) -> dict[str, Any]:
    """``from_pretrained``'s argument that puts a rank's model on its GPU; none for a single process, or without GPUs."""
    return {"device_map": {"": torch.cuda.current_device()}} if group.size > 1 and torch.cuda.is_available() else {}


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


def _own_state_dict(
    model: nn.Module, tensors: Mapping[str, Any], family: MoEFamily, owned: Mapping[int, Sequence[int]], dtype: torch.dtype
) -> dict[str, Any]:
    """Replace every expert entry by lazy packed ones of this rank's experts; the rest stays as it is."""
    prefixes = tuple(f"{path}." for layer_id in owned for path in family.checkpoint_paths(layer_id))
    own: dict[str, Any] = {key: value for key, value in tensors.items() if not key.startswith(prefixes)}
    quantised = next((key for key in tensors if key.startswith(prefixes) and key.endswith(_QUANTISED_ENDINGS)), None)
    if quantised is not None:
        raise ValueError(f"the checkpoint holds {quantised}, a quantised weight, which the experts hook cannot serve; dequantise it first")
    for layer_id, experts in owned.items():
        module, paths = experts_module(model, family, layer_id), family.checkpoint_paths(layer_id)
        for packed, parts in family.packed_parameters.items():
            name, shape = f"{family.experts_path(layer_id)}.{packed}", getattr(module, packed).shape
            whole = next((f"{path}.{packed}" for path in paths if f"{path}.{packed}" in tensors), None)
            if not experts:
                own[name] = torch.empty(shape, dtype=dtype)  # nothing to read
            elif whole is not None:
                own[name] = _ChosenExperts(tensors[whole], whole, experts, shape, dtype)
            elif not parts:
                raise ValueError(f"the checkpoint lacks {name}; it is truncated or of another model")
            else:
                path = next((path for path in paths if f"{path}.{experts[0]}.{parts[0]}" in tensors), paths[0])
                own[name] = _PackedExperts(tensors, [[f"{path}.{expert}.{part}" for part in parts] for expert in experts], shape, dtype)
    return own


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
            own = _own_state_dict(model, tensors, family, owned, load_config.dtype)
            load: Callable[..., Any] = model_class._load_pretrained_model
            return load(model, own, checkpoint_files, load_config, *args, **kwargs)

    for name in ("__name__", "__qualname__", "__module__"):  # Transformers looks the renaming of keys up by class
        setattr(OwnShard, name, getattr(model_class, name))
    return OwnShard
