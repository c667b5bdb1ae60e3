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

GATED_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


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
    layers: str = "model.layers"
    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    packed_parameters: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: GATED_PROJECTIONS)
    """Packed parameter (E, rows, columns) -> the per-expert checkpoint matrices it stacks row by row."""

    def moe_layer_ids(self, config: Any) -> list[int]:
        """Indices of the decoder layers that hold an MoE block; dense layers in between are skipped."""
        return [layer for layer in range(config.num_hidden_layers) if self.is_moe_layer(config, layer)]

    def experts_path(self, layer_id: int) -> str:
        """Module path of a layer's experts in the causal LM, also the prefix of their checkpoint keys."""
        return f"{self.layers}.{layer_id}.{self.experts}"


def _qwen_is_moe(config: Any, layer: int) -> bool:
    return layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def _deepseek_is_moe(config: Any, layer: int) -> bool:
    return layer >= config.first_k_dense_replace


FAMILIES: dict[str, MoEFamily] = {
    family.model_type: family
    for family in (
        MoEFamily("qwen3_moe", lambda config: config.num_experts, _qwen_is_moe, scores="softmax, sum to 1 only with norm_topk_prob"),
        MoEFamily(
            "deepseek_v2",
            lambda config: config.n_routed_experts,
            _deepseek_is_moe,
            scores="softmax, never normalised, times routed_scaling_factor; slots in no order",
            shared_experts="mlp.shared_experts",
        ),
        MoEFamily(
            "deepseek_v3",
            lambda config: config.n_routed_experts,
            _deepseek_is_moe,
            scores="sigmoid, sum to routed_scaling_factor with norm_topk_prob; slots in no order",
            shared_experts="mlp.shared_experts",
        ),
    )
}
"""Model type in ``config.json`` -> its facts."""


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
