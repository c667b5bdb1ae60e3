"""``CAPMoEModel``: a Transformers causal LM whose experts are shared by the ranks of a job.

Letters: ``B`` batch rows, ``S`` sequence positions, ``T`` = B * S tokens of this rank, ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoConfig, StoppingCriteria, StoppingCriteriaList
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from cap_hf.config import CAPConfig
from cap_hf.families import MoEFamily, family_of
from cap_hf.layout import ExpertLayout
from cap_hf.parallel.experts import HOOK_NAME, ExpertsRuntime, LayerRuntime, RoutingObserver
from cap_hf.parallel.groups import ExpertGroup, Traffic, init_expert_group
from cap_hf.parallel.loading import experts_module, own_shard_class, set_expert_parameters
from cap_hf.parallel.moving import gathered_state_dict, move_experts
from cap_hf.topology import Topology

__all__ = ["CAPMoEModel"]

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")
_OWNED_ARGUMENTS = ("experts_implementation", "distributed_config", "tp_plan", "tp_size", "device_mesh", "quantization_config", "gguf_file")


class ForwardObserver(RoutingObserver, Protocol):
    """An observer that also wants to know where each forward begins."""

    def begin_forward(self, recorded: torch.Tensor, continues: bool) -> None:
        """Which tokens of this forward are real, (B, S) bool, and whether its rows continue those of the last one."""


class _GenerationState(StoppingCriteria):
    """Follows ``generate`` without ever stopping it: which rows are finished, and which forwards only keep other ranks company."""

    def __init__(self, eos_token_ids: list[int]) -> None:
        self.eos_token_ids = torch.tensor(eos_token_ids, dtype=torch.long)
        self.finished: torch.Tensor | None = None
        self.has_new_tokens = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ended = torch.isin(input_ids[:, -1], self.eos_token_ids.to(input_ids.device))
        self.finished = ended if self.finished is None else self.finished | ended
        self.has_new_tokens = True
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def active_rows(self, batch_size: int) -> torch.Tensor | None:
        """Rows whose next token matters, (B,) bool; None for all. Called once per forward."""
        if self.finished is None or len(self.finished) != batch_size:
            return None
        active = ~self.finished if self.has_new_tokens else torch.zeros_like(self.finished)
        self.has_new_tokens = False
        return active


class CAPMoEModel(nn.Module):
    """Wraps a Transformers causal LM: placement-aware expert parallelism and pruning in its MoE layers.

    Attributes not defined here are the wrapped model's (``config``, ``device``, ``dtype``, ``get_input_embeddings``, ...).
    With one process and a layout for R ranks, this process plays all R: row b of a batch belongs to rank b mod R, pruning
    acts as on R ranks and nothing is sent.

    Args:
        model: a complete causal LM of a supported family; under a launcher with several processes, every process gives
            the same one and keeps its own experts. ``from_pretrained`` needs far less memory.
        cap_config: layout and pruning; default: experts in id order, no pruning.

    Raises:
        ValueError: an unsupported model, or a layout of other layers, experts or ranks.
    """

    def __init__(self, model: Any, cap_config: CAPConfig | None = None) -> None:
        group = init_expert_group()
        with group.all_or_none():
            family, layout = _resolve(model.config, cap_config or CAPConfig(), group)
        if group.size > 1:
            for layer_id, experts in _owned(layout, group).items():
                module = experts_module(model, family, layer_id)
                cut = {name: getattr(module, name).detach()[experts].clone() for name in family.packed_parameters}
                set_expert_parameters(module, cut)
        model.set_experts_implementation(HOOK_NAME)
        self._install(model, family, ExpertsRuntime(group, cap_config or CAPConfig(), layout))

    def _install(self, model: Any, family: MoEFamily, runtime: ExpertsRuntime) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family
        self._runtime = runtime
        self._generation: _GenerationState | None = None
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._connect_layers()

    def _connect_layers(self) -> None:
        for layer, layer_id in enumerate(self.layout.layer_ids.tolist()):
            experts = experts_module(self.model, self.family, layer_id)
            device = next(experts.parameters()).device
            experts.cap_runtime = LayerRuntime(self._runtime, layer, device)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *model_args: Any, cap_config: CAPConfig | None = None, **kwargs: Any) -> Any:
        """Load a checkpoint; each rank reads the dense part and its own experts only.

        Args:
            name_or_path: what ``AutoModelForCausalLM.from_pretrained`` takes.
            cap_config: layout and pruning; default: experts in id order, no pruning.
            **kwargs: everything Transformers takes (``dtype``, ``device_map``, ``attn_implementation``, ...).

        Raises:
            ValueError: on every rank, before weights are read, for an unsupported model, an argument that contradicts
                expert parallelism, or a layout that does not fit; also for a truncated or non-safetensors checkpoint.
            RankError: another rank failed; names it.
        """
        cap_config = cap_config or CAPConfig()
        group = init_expert_group()
        with group.all_or_none():
            taken = [name for name in _OWNED_ARGUMENTS if kwargs.get(name) is not None]
            if taken:
                raise ValueError(
                    f"{taken[0]}={kwargs[taken[0]]!r} contradicts cap_config, which shares out the experts itself; leave it out"
                )
            hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
            config = kwargs.get("config") or AutoConfig.from_pretrained(name_or_path, **hub)
            family, layout = _resolve(config, cap_config, group)
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with group.all_or_none():
            shard_class = own_shard_class(model_class, family, _owned(layout, group))
            with _one_progress_bar(group):
                loaded = shard_class.from_pretrained(name_or_path, *model_args, experts_implementation=HOOK_NAME, **kwargs)
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        model.__class__ = model_class
        wrapper = cls.__new__(cls)
        wrapper._install(model, family, ExpertsRuntime(group, cap_config, layout))
        return (wrapper, *info) if info else wrapper

    @property
    def group(self) -> ExpertGroup:
        """The ranks that share this model."""
        return self._runtime.group

    @property
    def layout(self) -> ExpertLayout:
        """Where the experts are now."""
        return self._runtime.layout

    @property
    def cap_config(self) -> CAPConfig:
        """The options in force now."""
        return self._runtime.config

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent since the last ``traffic.reset()``."""
        return self._runtime.group.traffic

    @property
    def top_k(self) -> int:
        """Experts per token ``K``."""
        return int(self.model.config.num_experts_per_tok)

    def set_pruning(self, pruning: str, prune_threshold: float = 0.0, **changes: Any) -> None:
        """Change the pruning rule of the live model; arguments and errors as in ``CAPConfig``."""
        self._runtime.config = self._runtime.config.replace(pruning=pruning, prune_threshold=prune_threshold, **changes)

    def apply_layout(self, layout: ExpertLayout) -> None:
        """Re-lay out the live model; every rank calls it, and only experts that change rank travel.

        Raises:
            ValueError: on every rank, if the layout is of other layers, experts or ranks; nothing has moved then.
        """
        with self.group.all_or_none():
            _check_fits(layout, self.family.moe_layer_ids(self.model.config), self.layout.num_experts, self.group)
        if self.group.size > 1:
            move_experts(self.model, self.family, self.layout, layout, self.group)
        self._runtime.layout = layout
        self._connect_layers()

    def attach(self, observer: ForwardObserver | None) -> None:
        """Let ``observer`` see every forward and routing decision; None detaches it."""
        self._runtime.observer = observer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward. Under several ranks every rank must call it equally often, with any batch."""
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's ``generate``; ranks may differ in batch size, prompt length and stopping point.

        A rank that is done keeps taking part until all are; its own finished sequences send nothing any more.
        """
        if self.group.size > 1:
            kwargs["synced_gpus"] = True
        with self._following(kwargs):
            return self.model.generate(*args, **kwargs)

    @contextmanager
    def _following(self, kwargs: dict[str, Any]) -> Iterator[None]:
        """Track finished rows where rows keep their order: without beams or an assistant."""
        generation: Any = kwargs.get("generation_config") or self.model.generation_config
        if (kwargs.get("num_beams") or generation.num_beams or 1) > 1 or kwargs.get("assistant_model") is not None:
            yield
            return
        eos = kwargs.get("eos_token_id", generation.eos_token_id)
        self._generation = _GenerationState(eos if isinstance(eos, list) else [] if eos is None else [int(eos)])
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), self._generation])
        try:
            yield
        finally:
            self._generation = self._runtime.routed = None

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Gather the experts and save an ordinary Transformers checkpoint; every rank calls it, rank 0 writes."""
        state_dict = gathered_state_dict(self.model, self.family, self.layout, self.group)
        with self.group.all_or_none():
            if self.group.rank == 0:
                self.model._weight_conversions = None  # lets Transformers write the family's own per-expert keys
                self.model.save_pretrained(save_directory, state_dict=dict(state_dict), **kwargs)

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the hook, out of band, what the flat tokens of this forward are: padding, finished rows, owners."""
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        batch_size, length = tokens.shape[:2]
        runtime = self._runtime
        if runtime.is_virtual:
            owners = torch.arange(batch_size, device=tokens.device) % runtime.layout.num_ranks
            runtime.source_rank = owners.repeat_interleave(length)
        active = self._generation.active_rows(batch_size) if self._generation is not None else None
        runtime.routed = None if active is None or bool(active.all()) else active.repeat_interleave(length)
        if runtime.observer is not None:
            mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            recorded = _real_tokens(mask, tokens, length)
            if active is not None:
                recorded = recorded & active[:, None].to(recorded.device)
            runtime.observer.begin_forward(recorded, continues=cache is not None and cache.get_seq_length() > 0)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)


@contextmanager
def _one_progress_bar(group: ExpertGroup) -> Iterator[None]:
    """Only rank 0 shows Transformers' loading bar."""
    silence = group.rank > 0 and logging.is_progress_bar_enabled()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()


def _real_tokens(mask: torch.Tensor | None, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Which of this forward's tokens are not padding, (B, S) bool; the mask may cover cached positions before them."""
    if mask is None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if mask.ndim != 2:
        raise ValueError(f"attention_mask has {mask.ndim} dimensions; recording needs the (batch, positions) padding mask")
    return mask[:, -length:].bool()


def _owned(layout: ExpertLayout, group: ExpertGroup) -> dict[int, list[int]]:
    """Decoder layer index -> experts this process holds: its rank's, or all of them where it plays every rank."""
    layers = layout.layer_ids.tolist()
    if group.size == 1:
        return {layer_id: list(range(layout.num_experts)) for layer_id in layers}
    return {layer_id: layout.experts_of(layer, group.rank).tolist() for layer, layer_id in enumerate(layers)}


def _resolve(config: Any, cap_config: CAPConfig, group: ExpertGroup) -> tuple[MoEFamily, ExpertLayout]:
    """Family and layout of a model, checked against each other and against the number of processes."""
    family = family_of(config)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "the checkpoint is quantised (quantization_config is set), which the experts hook cannot serve; use a bf16, fp16 or fp32 one"
        )
    layer_ids, num_experts = family.moe_layer_ids(config), family.num_experts(config)
    layout = cap_config.load_layout()
    if layout is None:
        if num_experts < group.size:
            raise ValueError(f"the model has {num_experts} experts per layer for {group.size} processes; launch at most {num_experts}")
        layout = ExpertLayout.sequential(len(layer_ids), num_experts, Topology(group.size), layer_ids)
    _check_fits(layout, layer_ids, num_experts, group)
    return family, layout


def _check_fits(layout: ExpertLayout, layer_ids: list[int], num_experts: int, group: ExpertGroup) -> None:
    if layout.layer_ids.tolist() != layer_ids:
        raise ValueError(
            f"the layout is for {layout.num_layers} MoE layers {layout.layer_ids.tolist()}, the model has {len(layer_ids)}: {layer_ids}; "
            "place again from a trace of this model"
        )
    if layout.num_experts != num_experts:
        raise ValueError(
            f"the layout places {layout.num_experts} experts per layer, the model has {num_experts}; place again from a trace of this model"
        )
    if group.size > 1 and layout.num_ranks != group.size:
        raise ValueError(
            f"the layout is for {layout.num_ranks} ranks, {group.size} processes run; launch {layout.num_ranks}, or place for {group.size}"
        )
