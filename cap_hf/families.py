"""One registry entry per MoE family: where its blocks are, and how its checkpoints name the experts.

Letters: ``L`` MoE layers, ``E`` experts per layer, ``K`` experts per token. Every supported family runs its experts
through Transformers' experts interface: ``experts(hidden (T, H), top_k_index (T, K), top_k_weights (T, K)) -> (T, H)``,
so only names and counts differ. Nothing is guessed: a model type without an entry is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAMILIES", "MoEFamily", "family_of"]

GATED_PROJECTIONS = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)}


@dataclass(frozen=True)
class MoEFamily:
    """Facts about one model type. Paths are relative to a decoder layer; checkpoint keys start at the causal LM."""

    model_type: str
    num_experts: Callable[[Any], int]
    is_moe_layer: Callable[[Any, int], bool]
    scores: str
    """How the router leaves the K selected scores; thresholds are relative to a token's own sum because this differs."""
    shared_experts: str | None = None
    """Path of the experts that every token uses: never pruned, never travelling."""
    shared_follow: bool = False
    """The block runs its shared experts after the routed ones, on the same input."""
    layers: str = "model.layers"
    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    packed_parameters: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: GATED_PROJECTIONS)
    """Packed parameter (E, ...) -> the per-expert checkpoint matrices it stacks row by row; none if checkpoints are packed, too."""
    checkpoint_layers: tuple[str, ...] = ()
    """What checkpoints may say instead of ``layers``."""
    checkpoint_experts: tuple[str, ...] = ()
    """What checkpoints may say instead of ``experts``."""

    def moe_layer_ids(self, config: Any) -> list[int]:
        """Indices of the decoder layers that hold an MoE block; dense layers in between are skipped."""
        return [layer for layer in range(config.num_hidden_layers) if self.is_moe_layer(config, layer)]

    def experts_path(self, layer_id: int) -> str:
        """Module path of a layer's experts in the causal LM."""
        return f"{self.layers}.{layer_id}.{self.experts}"

    def shared_experts_path(self, layer_id: int) -> str | None:
        """Module path of a layer's shared experts in the causal LM."""
        return self.shared_experts and f"{self.layers}.{layer_id}.{self.shared_experts}"

    def checkpoint_paths(self, layer_id: int) -> list[str]:
        """Prefixes that the keys of a layer's experts may have in a checkpoint."""
        return [
            f"{layers}.{layer_id}.{experts}"
            for layers in (self.layers, *self.checkpoint_layers)
            for experts in (self.experts, *self.checkpoint_experts)
        ]


def _qwen_is_moe(config: Any, layer: int) -> bool:
    return layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def _deepseek_is_moe(config: Any, layer: int) -> bool:
    return layer >= config.first_k_dense_replace


def _every_layer(config: Any, layer: int) -> bool:
    return True


def _num_experts(config: Any) -> int:
    return int(config.num_experts)


def _num_routed(config: Any) -> int:
    return int(config.n_routed_experts)


def _num_local(config: Any) -> int:
    return int(config.num_local_experts)


_NORMALISED = "softmax over the selected logits, or over all and normalised: sum to 1"
_SIGMOID = "sigmoid, sum to routed_scaling_factor with norm_topk_prob; chosen with a correction bias, in groups; slots in no order"
_MIXTRAL_PROJECTIONS = {"gate_up_proj": ("w1.weight", "w3.weight"), "down_proj": ("w2.weight",)}
_GPT_OSS_PACKED: dict[str, tuple[str, ...]] = {"gate_up_proj": (), "gate_up_proj_bias": (), "down_proj": (), "down_proj_bias": ()}
_NESTED = ("model.language_model.layers",)

FAMILIES: dict[str, MoEFamily] = {
    family.model_type: family
    for family in (
        MoEFamily("qwen3_moe", _num_experts, _qwen_is_moe, scores="softmax, sum to 1 only with norm_topk_prob"),
        MoEFamily(
            "qwen2_moe", _num_experts, _qwen_is_moe, scores="softmax, sum to 1 only with norm_topk_prob", shared_experts="mlp.shared_expert"
        ),
        MoEFamily(
            "deepseek_v2",
            _num_routed,
            _deepseek_is_moe,
            scores="softmax, never normalised, times routed_scaling_factor; slots in no order",
            shared_experts="mlp.shared_experts",
            shared_follow=True,
        ),
        MoEFamily("deepseek_v3", _num_routed, _deepseek_is_moe, _SIGMOID, shared_experts="mlp.shared_experts", shared_follow=True),
        MoEFamily("glm4_moe", _num_routed, _deepseek_is_moe, _SIGMOID, shared_experts="mlp.shared_experts", shared_follow=True),
        MoEFamily(
            "mixtral",
            _num_local,
            _every_layer,
            _NORMALISED,
            packed_parameters=_MIXTRAL_PROJECTIONS,
            checkpoint_experts=("block_sparse_moe.experts",),
        ),
        MoEFamily("olmoe", _num_experts, _every_layer, scores="softmax, sum to 1 only with norm_topk_prob"),
        MoEFamily("gpt_oss", _num_local, _every_layer, _NORMALISED, router="mlp.router", packed_parameters=_GPT_OSS_PACKED),
        MoEFamily("qwen3_next", _num_experts, _qwen_is_moe, _NORMALISED, shared_experts="mlp.shared_expert"),
        MoEFamily(
            "qwen3_5_moe_text", _num_experts, _every_layer, _NORMALISED, shared_experts="mlp.shared_expert", checkpoint_layers=_NESTED
        ),
    )
}
"""Model type of the (text) configuration -> its facts; qwen3_5_moe names its text part qwen3_5_moe_text."""


def family_of(config: Any) -> MoEFamily:
    """The registry entry of a Transformers config.

    Raises:
        ValueError: the model type has no entry, or its configuration holds no MoE layer.
    """
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None:
        raise ValueError(f"model type {getattr(config, 'model_type', None)!r} is not supported; supported: {', '.join(FAMILIES)}")
    if not family.moe_layer_ids(config):
        raise ValueError(f"this {family.model_type} has {config.num_hidden_layers} layers and 0 MoE layers; give a model with MoE layers")
    return family
