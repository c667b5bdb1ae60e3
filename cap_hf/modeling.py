"""``CAPMoEModel``: a Transformers causal LM whose experts are shared by the ranks of a job.

Letters: ``B`` batch rows, ``S`` sequence positions, ``T`` = B * S tokens of this rank, ``R`` ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from cap_hf.config import CAPConfig
from cap_hf.families import MoEFamily, family_of
from cap_hf.layout import ExpertLayout
from cap_hf.parallel.experts import HOOK_NAME, ExpertsRuntime, RoutingObserver, check_pruning, connect_layer, run_without_tokens
from cap_hf.parallel.groups import ExpertGroup, Traffic, init_expert_group
from cap_hf.parallel.loading import default_device_map, experts_module, own_shard_class, set_expert_parameters
from cap_hf.parallel.moving import gathered_state_dict, move_experts
from cap_hf.topology import Topology

__all__ = ["CAPMoEModel"]

_OWNED_ARGUMENTS = ("experts_implementation", "distributed_config", "tp_plan", "tp_size", "device_mesh", "quantization_config", "gguf_file")
_LOADING_ARGUMENTS = ("state_dict", "output_loading_info", "device_map")  # of no interest to a config
_logger = logging.get_logger(__name__)


class ForwardObserver(RoutingObserver, Protocol):
    """An observer that also wants to know where each forward begins and ends."""

    def begin_forward(self, recorded: torch.Tensor, cache: Any, past_length: int) -> None:
        """Which tokens of this forward are real, (B, S) bool; the cache given to it, and how many positions that holds."""

    def end_forward(self, cache: Any) -> None:
        """The forward succeeded and returned ``cache``."""


class CAPMoEModel(nn.Module):
    """Wraps a Transformers causal LM: placement-aware expert parallelism and pruning in its MoE layers.

    Attributes not defined here are the wrapped model's (``device``, ``dtype``, ``get_input_embeddings``, ...).
    With one process and a layout for R ranks, this process plays all R: row b of a batch belongs to rank b mod R, pruning
    acts as on R ranks and nothing is sent.

    Args:
        model: a complete causal LM of a supported family; under a launcher with several processes, every process gives
            the same one and keeps its own experts. ``from_pretrained`` needs far less memory.
        cap_config: layout and pruning; default: experts in id order, no pruning. Every rank must give the same.

    Raises:
        ValueError: an unsupported or already wrapped model, a layout of other layers, experts or ranks, or layouts that
            differ between ranks.
    """

    _joined_model: CAPMoEModel | None = None  # of this process

    def __init__(self, model: Any, cap_config: CAPConfig | None = None) -> None:
        group = init_expert_group()
        with group.all_or_none():
            if isinstance(model, CAPMoEModel) or any(hasattr(module, "cap_runtime") for module in model.modules()):
                raise ValueError(f"this {type(model).__name__} is wrapped already; use apply_layout and set_pruning to change it")
            cap_config = _checked(cap_config)
            family, layout = _resolve(model.config, cap_config, group)
        group.require_equal(layout.fingerprint, "the layout's fingerprint")
        if group.size > 1:
            for layer_id, experts in _owned(layout, group).items():
                module = experts_module(model, family, layer_id)
                cut = {name: getattr(module, name).detach()[experts].clone() for name in family.packed_parameters}
                set_expert_parameters(module, cut)
        model.set_experts_implementation(HOOK_NAME)
        self._install(model, family, ExpertsRuntime(group, cap_config, layout))

    def _install(self, model: Any, family: MoEFamily, runtime: ExpertsRuntime) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family
        self.training = model.training
        self._runtime = runtime
        self._generating_with_pad: int | None = None
        self._played: int | None = None
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward, always_call=True)
        self._connect_layers()
        if runtime.is_virtual:
            _logger.warning(
                f"one process plays all {runtime.layout.num_ranks} ranks of the layout: pruning acts as on them, nothing is sent"
            )

    def _connect_layers(self) -> None:
        for layer, (layer_id, module) in enumerate(zip(self.layout.layer_ids.tolist(), self._experts(), strict=True)):
            path = self.family.shared_experts_path(layer_id) if self.family.shared_follow else None
            connect_layer(module, self._runtime, layer, self.model.get_submodule(path) if path else None)

    def _experts(self) -> list[Any]:
        """The experts modules, one per MoE layer."""
        return [experts_module(self.model, self.family, layer_id) for layer_id in self.layout.layer_ids.tolist()]

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path | None, *model_args: Any, cap_config: CAPConfig | None = None, **kwargs: Any) -> Any:
        """Load a checkpoint; each rank reads the dense part and its own experts only.

        Args:
            name_or_path: what ``AutoModelForCausalLM.from_pretrained`` takes.
            cap_config: layout and pruning; default: experts in id order, no pruning.
            **kwargs: everything Transformers takes (``dtype``, ``device_map``, ``attn_implementation``, ...). Several ranks on
                GPUs load each to its own, unless ``device_map`` says otherwise.

        Raises:
            ValueError: on every rank, before weights are read, for an unsupported model, an argument that contradicts
                expert parallelism, or a layout that does not fit; also for a truncated or non-safetensors checkpoint.
            RankError: another rank failed; names it.
        """
        group = init_expert_group()
        with group.all_or_none():
            cap_config = _checked(cap_config)
            taken = [name for name in _OWNED_ARGUMENTS if kwargs.get(name) is not None]
            if taken:
                value = kwargs[taken[0]]
                raise ValueError(f"{taken[0]}={value!r} contradicts cap_config, which shares out the experts itself; leave it out")
            config = kwargs.get("config")
            if isinstance(config, PreTrainedConfig):
                kwargs["config"] = config.get_text_config(decoder=True)
            else:
                overrides = {key: value for key, value in kwargs.items() if key not in ("config", *_LOADING_ARGUMENTS)}
                source: Any = config or name_or_path
                config, _ = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **overrides)
            _refuse_quantised(config)
            config = config.get_text_config(decoder=True)  # of a composite model, the causal LM
            family, layout = _resolve(config, cap_config, group)
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        group.require_equal(layout.fingerprint, "the layout's fingerprint")
        with group.all_or_none():
            shard_class = own_shard_class(model_class, family, _owned(layout, group))
            with _one_progress_bar(group):
                options = default_device_map(group) | kwargs | {"experts_implementation": HOOK_NAME}
                loaded = shard_class.from_pretrained(name_or_path, *model_args, **options)
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

    @property
    def config(self) -> Any:
        """The wrapped model's configuration."""
        return self.model.config

    @config.setter
    def config(self, value: Any) -> None:
        self.model.config = value

    @property
    def generation_config(self) -> Any:
        """The wrapped model's generation defaults."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.model.generation_config = value

    def set_pruning(self, pruning: str, prune_threshold: float = 0.0, **changes: Any) -> None:
        """Change the pruning rule of the live model, on every rank alike; arguments and errors as in ``CAPConfig``."""
        if "layout" in changes:
            raise ValueError("set_pruning does not take a layout; use apply_layout")
        config = self._runtime.config.replace(pruning=pruning, prune_threshold=prune_threshold, **changes)
        check_pruning(config, self.top_k)
        self._runtime.configure(self.layout, config)

    def apply_layout(self, layout: ExpertLayout | str | Path) -> None:
        """Re-lay out the live model; every rank calls it, and only experts that change rank travel.

        Raises:
            ValueError: on every rank, if the layout is of other layers, experts or ranks, or differs between ranks; nothing
                has moved then.
        """
        self._refuse_inside_joined("apply_layout")
        with self.group.all_or_none():
            config = self._runtime.config.replace(layout=layout)
            layout = config.load_layout() or self.layout
            _check_fits(layout, self.family.moe_layer_ids(self.model.config), self.layout.num_experts, self.group)
        self.group.require_equal(layout.fingerprint, "the layout's fingerprint")
        if self.group.size > 1:
            move_experts(self.model, self.family, self.layout, layout, self.group)
        self._runtime.configure(layout, config)
        self._connect_layers()

    def attach(self, observer: ForwardObserver) -> None:
        """Let ``observer`` see every forward and routing decision from now on."""
        self._runtime.observers.append(observer)

    def detach(self, observer: ForwardObserver) -> None:
        """Undo ``attach``."""
        self._runtime.observers.remove(observer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward. Several ranks must call it equally often, with any batch, or inside ``joined``."""
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's ``generate``, inside ``joined``: ranks may differ in batch, prompt, options and stopping point."""
        if self.group.size > 1 and isinstance(kwargs.get("assistant_model"), CAPMoEModel):
            raise ValueError(
                "the assistant is a CAPMoEModel too, and two shared models cannot take turns at different times; give a plain one"
            )
        kwargs.pop("synced_gpus", None)  # joined does the same without forwards that compute nothing
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        settings = [kwargs] + [vars(each) for each in (given, self.generation_config) if each is not None]
        found = [each[key] for key in ("pad_token_id", "eos_token_id") for each in settings if each.get(key) is not None]
        pads = torch.as_tensor(found[0]).flatten().tolist() if found else [-1]
        outer, self._generating_with_pad = self._generating_with_pad, int(pads[0])
        try:
            with self.joined():
                return self.model.generate(*args, **kwargs)
        finally:
            self._generating_with_pad = outer

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Ranks may run different numbers of forwards inside, none included; every rank must enter. Gradients are off.

        Before each forward the ranks count who has one to run. A rank that leaves, by an exception too, stays until all
        have left and takes part in the others' MoE layers without tokens of its own; so nobody waits for it, and an error
        surfaces on the rank that had it once the others are done. Where the failure is in the exchange of a layer itself,
        all results are void: the rank raises at once, and the launcher ends the others.
        """
        runtime = self._runtime
        if runtime.joined or self.group.size == 1:
            yield
            return
        if CAPMoEModel._joined_model is not None:
            raise ValueError("another CAPMoEModel is joined, and ranks could answer for the wrong one; leave its joined or generate first")
        CAPMoEModel._joined_model = self
        # a failure outside, or a recomputation that activation checkpointing ended in the middle of a layer, is over
        runtime.joined, runtime.in_forward, runtime.in_exchange = True, False, False
        try:
            with torch.no_grad():
                yield
        finally:
            runtime.joined, CAPMoEModel._joined_model = False, None
            if runtime.in_exchange:
                runtime.lane.post_failure(sys.exception())
            elif not runtime.lane.progress.broken:
                self._keep_company()

    @contextmanager
    def playing(self, rank: int) -> Iterator[None]:
        """One process that plays all ranks: every row of a batch belongs to ``rank`` inside, as if that rank ran it.

        Raises:
            ValueError: a rank that the layout does not have, or a process that is a rank itself.
        """
        if self.group.size > 1 or not 0 <= rank < self.layout.num_ranks:
            raise ValueError(f"playing rank {rank}: one process can play 0 to {self.layout.num_ranks - 1}, {self.group.size} run here")
        outer, self._played = self._played, rank
        try:
            yield
        finally:
            self._played = outer

    @contextmanager
    def unpruned(self) -> Iterator[None]:
        """No pruning of this rank's tokens inside; inside ``joined`` too, and whatever the others do meanwhile."""
        runtime = self._runtime
        config = runtime.config
        runtime.config = config.replace(pruning="none", prune_threshold=0.0)
        try:
            yield
        finally:
            runtime.config = config

    def _refuse_inside_joined(self, what: str) -> None:
        if self._runtime.joined:
            raise RuntimeError(f"{what} needs every rank at the same step, but inside joined they may differ; call it outside")

    def _keep_company(self) -> None:
        """Take part in the other ranks' forwards until none has one left."""
        self._run_missing_layers()  # of a forward that an interrupt ended
        self._begin_forward()
        while self._runtime.agree(False, 0):
            self._run_missing_layers()
            self._begin_forward()
        self._end_forward()

    def _run_missing_layers(self) -> None:
        """Dispatch nothing in the MoE layers that this forward has not reached, so that every rank counts as many."""
        runtime = self._runtime
        observers, runtime.observers = runtime.observers, []  # there is nothing to see
        try:
            for module in self._experts()[runtime.layers_run :] if runtime.in_forward else []:
                run_without_tokens(module, int(self.model.config.hidden_size), self.top_k)
        finally:
            runtime.observers = observers
            self._end_forward()

    def _begin_forward(self) -> None:
        """Before the vote, so that a rank that is interrupted in it knows that it takes part."""
        runtime = self._runtime
        runtime.layers_run, runtime.in_forward = 0, True
        runtime.lane.progress.step += 1
        runtime.lane.progress.where = "the vote before a forward"

    def _end_forward(self) -> None:
        """Once per forward, however it ended."""
        runtime = self._runtime
        if runtime.in_forward:
            runtime.in_forward, runtime.num_tokens = False, None
            runtime.lane.progress.step += 1

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Gather the experts and save an ordinary Transformers checkpoint; every rank calls it, rank 0 writes."""
        self._refuse_inside_joined("save_pretrained")
        state_dict = gathered_state_dict(self.model, self.family, self.layout, self.group)
        with self.group.all_or_none():
            if self.group.rank == 0:
                self.model._weight_conversions = None  # lets Transformers write the family's own per-expert keys
                self.model.save_pretrained(save_directory, state_dict=dict(state_dict), **kwargs)

    def set_experts_implementation(self, experts_implementation: Any) -> NoReturn:
        """Not available: the experts are run by cap_hf."""
        raise ValueError(
            f"experts_implementation={experts_implementation!r} would bypass placement and pruning; unwrap with save_pretrained"
        )

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Not available as such: the experts must be gathered first."""
        raise ValueError("push_to_hub would upload this rank's experts only; use save_pretrained(folder, push_to_hub=True, repo_id=...)")

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the hook, out of band, what the flat tokens of this forward are: padding, new or continued, whose."""
        runtime = self._runtime
        given = [args[0] if args else kwargs.get("input_ids"), kwargs.get("inputs_embeds"), args[4] if len(args) > 4 else None]
        tokens = next((each for each in given if each is not None), None)
        runtime.source_rank = None
        self._begin_forward()
        if self.group.size > 1:
            runtime.agree(True, 0 if tokens is None else tokens.shape[:2].numel())
        if tokens is None:
            return  # the wrapped model has its own words for that
        batch_size, length = tokens.shape[:2]
        if runtime.is_virtual:
            owners = torch.arange(batch_size, device=tokens.device) % runtime.layout.num_ranks
            if self._played is not None:
                owners.fill_(self._played)
            runtime.source_rank = owners.repeat_interleave(length)
        if runtime.observers:
            mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
            cache = args[3] if len(args) > 3 else kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is None and kwargs.get("use_cache") is False and self._generating_with_pad is not None:
                raise ValueError("use_cache is False; recording generate needs the cache, else every step repeats all tokens: leave it on")
            past_length = int(cache.get_seq_length()) if cache is not None else 0
            recorded = _real_tokens(mask, tokens, past_length, self._generating_with_pad)
            for observer in runtime.observers:
                observer.begin_forward(recorded, cache, past_length)

    def _after_forward(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Close the forward; called without output where it failed."""
        runtime = self._runtime
        runtime.source_rank = None
        if runtime.joined and not runtime.in_exchange:
            self._run_missing_layers()  # of an early exit or a failure
        elif output is None and runtime.in_forward:
            runtime.lane.post_failure(sys.exception())  # the others wait for this rank in a layer
        self._end_forward()
        if output is None:
            return
        cache = getattr(output, "cache", None)
        cache = getattr(output, "past_key_values", None) if cache is None else cache
        for observer in self._runtime.observers:
            observer.end_forward(cache)

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


def _real_tokens(mask: Any, tokens: torch.Tensor, past_length: int, pad_token_id: int | None) -> torch.Tensor:
    """Which of this forward's tokens are not padding, (B, S) bool.

    ``mask`` covers the cached positions too. While generating, a pad that is fed after the prompt stands for a finished row.
    """
    shape, has_ids = tokens.shape[:2], not tokens.is_floating_point()
    if mask is None or isinstance(mask, torch.Tensor) and mask.ndim == 2:
        part = torch.ones(shape, device=tokens.device) if mask is None else mask[:, past_length : past_length + shape[1]]
        real = part.bool()
        return real & (tokens != pad_token_id) if pad_token_id is not None and past_length and has_ids else real
    if pad_token_id is not None and has_ids:  # generate made a mask of another form; it takes pads for padding itself
        return tokens != pad_token_id
    form = f"{mask.ndim} dimensions" if isinstance(mask, torch.Tensor) else f"type {type(mask).__name__}"
    raise ValueError(f"attention_mask has {form}; recording needs the (batch, positions) padding mask")


def _checked(cap_config: Any) -> CAPConfig:
    if cap_config is not None and not isinstance(cap_config, CAPConfig):
        raise ValueError(f"cap_config is a {type(cap_config).__name__}; give a CAPConfig, CAPConfig.load(path) for a saved one")
    return cap_config or CAPConfig()


def _owned(layout: ExpertLayout, group: ExpertGroup) -> dict[int, list[int]]:
    """Decoder layer index -> experts this process holds: its rank's, or all of them where it plays every rank."""
    layers = layout.layer_ids.tolist()
    if group.size == 1:
        return {layer_id: list(range(layout.num_experts)) for layer_id in layers}
    return {layer_id: layout.experts_of(layer, group.rank).tolist() for layer, layer_id in enumerate(layers)}


def _refuse_quantised(config: Any) -> None:
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
        raise ValueError(
            f"the checkpoint is quantised ({method or 'quantization_config is set'}), and the experts hook serves bf16, fp16 and fp32 "
            "weights only; use such a checkpoint, or dequantise this one"
        )


def _resolve(config: Any, cap_config: CAPConfig, group: ExpertGroup) -> tuple[MoEFamily, ExpertLayout]:
    """Family and layout of a model, checked against each other and against the number of processes."""
    _refuse_quantised(config)
    family = family_of(config)
    layer_ids, num_experts = family.moe_layer_ids(config), family.num_experts(config)
    layout = cap_config.load_layout()
    if layout is None:
        if num_experts < group.size:
            raise ValueError(f"the model has {num_experts} experts per layer for {group.size} processes; launch at most {num_experts}")
        layout = ExpertLayout.sequential(len(layer_ids), num_experts, Topology(group.size), layer_ids)
    _check_fits(layout, layer_ids, num_experts, group)
    check_pruning(cap_config, int(config.num_experts_per_tok))
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
