"""Every MoE family, tiny and random with its peculiarities switched on: against plain Transformers, on one and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parallel import gap
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, Topology
from cap_hf.families import FAMILIES, family_of
from cap_hf.parallel.groups import init_expert_group
from cap_hf.parallel.loading import experts_module

SIZES: dict[str, Any] = dict(
    vocab_size=89, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=3, num_experts_per_tok=3,
    moe_intermediate_size=16, intermediate_size=24, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_shared_experts=2
) | dict(num_key_value_heads=4)
GROUPS: dict[str, Any] = dict(n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1)
LINEAR: dict[str, Any] = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention", "linear_attention"], shared_expert_intermediate_size=16, num_experts=8,
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", dict(num_experts=8, norm_topk_prob=True, tie_word_embeddings=True, mlp_only_layers=[1])),
    "qwen3_moe, raw scores": ("qwen3_moe", dict(num_experts=8, norm_topk_prob=False, decoder_sparse_step=2)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=8, norm_topk_prob=False, shared_expert_intermediate_size=16)),
    "deepseek_v2": ("deepseek_v2", MLA | GROUPS | dict(topk_method="group_limited_greedy")),
    "deepseek_v3": ("deepseek_v3", MLA | GROUPS | dict(norm_topk_prob=True)),
    "deepseek_v3, raw scores": ("deepseek_v3", MLA | GROUPS | dict(norm_topk_prob=False)),
    "glm4_moe": ("glm4_moe", GROUPS | dict(n_shared_experts=1, norm_topk_prob=True, use_qk_norm=True)),
    "mixtral": ("mixtral", dict(num_local_experts=8)),
    "olmoe": ("olmoe", dict(num_experts=8, norm_topk_prob=False, tie_word_embeddings=True)),
    "gpt_oss": (
        "gpt_oss",
        dict(num_local_experts=8, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "qwen3_next": ("qwen3_next", LINEAR | dict(mlp_only_layers=[1])),
    "qwen3_5_moe": ("qwen3_5_moe_text", LINEAR),
}


def tiny(case: str) -> Any:
    model_type, special = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | special))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="grouped_mm").eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:  # the default start leaves routers nearly tied
        if "norm" in name:
            torch.nn.init.normal_(tensor, mean=1.0, std=0.1)
        elif "inv_freq" not in name:
            # linear attention with larger weights amplifies rounding: plain Transformers' kernels differ by 7e-5 then
            torch.nn.init.normal_(tensor, std=0.1 if "linear_attn" in name else 0.2)
    return model


def save(case: str, folder: Path) -> Path:
    """The tiny model as ``save_pretrained`` writes it, in several files."""
    tiny(case).save_pretrained(folder, max_shard_size="40KB")
    return folder


def plain(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="grouped_mm").eval()


def interleaved(config: PreTrainedConfig, num_ranks: int, shift: int = 0) -> ExpertLayout:
    """Expert e on rank (e + shift) mod R in every MoE layer, one more shift per layer."""
    layers = family_of(config).moe_layer_ids(config)
    table = (np.arange(8) + shift + np.arange(len(layers))[:, None]) % num_ranks
    return ExpertLayout(table, Topology(num_ranks), layers)


def batch(rank: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded rows of token ids, others on every rank."""
    ids = torch.randint(3, 89, (2 + rank, 9 + rank), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def differences(model: Any, reference: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, bool]:
    """Largest relative difference of real tokens' logits, and whether greedy generation agrees."""
    with torch.no_grad():
        real = inputs["attention_mask"].bool()
        got, want = (each(**inputs).logits[real] for each in (model, reference))
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)
    return gap(got, want), torch.equal(model.generate(**inputs, **options), reference.generate(**inputs, **options))


def rank_family(folder: str, out: str) -> dict[str, Any]:
    """One family on all ranks: logits, tokens, a move to another layout, pruning against one process, saving."""
    group = init_expert_group()
    reference, inputs = plain(folder), batch(group.rank)
    layout = interleaved(reference.config, group.size)
    model = CAPMoEModel.from_pretrained(folder, cap_config=CAPConfig(layout=layout), dtype=torch.float32)
    held = {len(getattr(module, name)) for module in model._experts() for name in model.family.packed_parameters}
    results: dict[str, Any] = {"held": held, "before": differences(model, reference, inputs)}
    model.apply_layout(interleaved(reference.config, group.size, shift=1))
    results["after"] = differences(model, reference, inputs)
    model.save_pretrained(out)
    return results


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_transformers(rank_pool: Any, case: str, tmp_path: Path) -> None:
    folder, out = save(case, tmp_path / "in"), tmp_path / "out"
    for result in rank_pool(2).run(rank_family, str(folder), str(out)):
        assert result["held"] == {4}  # of 8 experts
        for difference, same_tokens in (result["before"], result["after"]):
            assert difference <= 1e-5 and same_tokens
    saved, original = plain(out).state_dict(), plain(folder).state_dict()
    assert saved.keys() == original.keys() and all(torch.equal(saved[key], original[key]) for key in original)


@pytest.mark.parametrize("case", CASES)
def test_one_process_equals_transformers(case: str, tmp_path: Path) -> None:
    folder = save(case, tmp_path)
    reference = plain(folder)
    model = CAPMoEModel.from_pretrained(folder, cap_config=CAPConfig(), dtype=torch.float32)
    assert differences(model, reference, batch()) == (0.0, True)
    model.apply_layout(interleaved(reference.config, 3))
    model.set_pruning("device", 1e-9)  # takes the path of single pairs, but nothing can be dropped
    difference, same_tokens = differences(model, reference, batch())
    assert difference <= 1e-5 and same_tokens
    model.set_pruning("device", 0.5)
    assert differences(model, reference, batch())[0] > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_registry_paths_exist(case: str, tmp_path: Path) -> None:
    model = tiny(case)
    family = family_of(model.config)
    layer_ids = family.moe_layer_ids(model.config)
    assert layer_ids == [n for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    for layer_id in layer_ids:
        module = experts_module(model, family, layer_id)
        assert {name for name, _ in module.named_parameters()} == set(family.packed_parameters)
        assert all(len(getattr(module, name)) == family.num_experts(model.config) == 8 for name in family.packed_parameters)
        layer = model.get_submodule(f"{family.layers}.{layer_id}")
        layer.get_submodule(family.router)
        assert (family.shared_experts is not None) == any("shared_expert" in name for name, _ in layer.named_modules())
        if family.shared_experts is not None:
            layer.get_submodule(family.shared_experts)


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "glm4_moe", "qwen3_5_moe"])
def test_packed_and_per_expert_checkpoints_of_any_type(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The same weights as one file of packed experts and as per-expert matrices; each read into each type."""
    reference = tiny(case).to(dtype)
    reference.save_pretrained(tmp_path / "per expert")
    written = load_file(tmp_path / "per expert" / "model.safetensors")
    assert any(".experts.7." in key for key in written)
    packed = {key: value for key, value in written.items() if ".experts." not in key}
    family = family_of(reference.config)
    for layer_id in family.moe_layer_ids(reference.config):
        path = next(path for path in family.checkpoint_paths(layer_id) if any(key.startswith(f"{path}.") for key in written))
        for name in family.packed_parameters:
            packed[f"{path}.{name}"] = getattr(experts_module(reference, family, layer_id), name).detach().contiguous()
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "packed" / "config.json").write_text((tmp_path / "per expert" / "config.json").read_text())
    for form in ("per expert", "packed"):
        for wanted in (dtype, torch.float32):
            model = CAPMoEModel.from_pretrained(tmp_path / form, dtype=wanted)
            want = plain(tmp_path / "per expert", wanted).state_dict()
            got = model.model.state_dict()
            assert got.keys() == want.keys()
            assert all(got[key].dtype == want[key].dtype and torch.equal(got[key], want[key]) for key in want)


def test_a_nested_text_model_is_read_from_its_composite_checkpoint(tmp_path: Path) -> None:
    """As vision-language releases of the family are: text weights under model.language_model, its settings under text_config."""
    save("qwen3_5_moe", tmp_path / "text")
    weights = {key: value for file in (tmp_path / "text").glob("*.safetensors") for key, value in load_file(file).items()}
    nested = {key.replace("model.", "model.language_model.", 1): value for key, value in weights.items()}
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in weights
    (tmp_path / "whole").mkdir()
    save_file(nested, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text)
    config.save_pretrained(tmp_path / "whole")
    model = CAPMoEModel.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    want = plain(tmp_path / "text").state_dict()
    assert all(torch.equal(value, want[key]) for key, value in model.model.state_dict().items())


@pytest.mark.parametrize(("case", "method"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")])
def test_quantised_checkpoints_are_refused_with_the_reason(case: str, method: str, tmp_path: Path) -> None:
    folder = save(case, tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match=rf"quantised \({method}\).*dequantise"):
        CAPMoEModel.from_pretrained(folder)


@pytest.mark.parametrize(("case", "ending"), [("gpt_oss", "gate_up_proj_blocks"), ("deepseek_v3", "3.down_proj.weight_scale_inv")])
def test_quantised_weights_without_the_setting_are_refused(case: str, ending: str, tmp_path: Path) -> None:
    model = tiny(case)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    key = f"model.layers.1.mlp.experts.{ending}"
    save_file(weights | {key: torch.zeros(4, dtype=torch.uint8)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"holds {key}, a quantised weight"):
        CAPMoEModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["down_proj_bias", "gate_up_proj"])
def test_packed_checkpoints_of_another_shape_or_without_a_part_are_refused(name: str, tmp_path: Path) -> None:
    tiny("gpt_oss").save_pretrained(tmp_path)
    weights, key = load_file(tmp_path / "model.safetensors"), f"model.layers.2.mlp.experts.{name}"
    save_file(weights | {key: weights[key][:5].contiguous()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{key} has shape \(5, .* not \(8 or more, "):
        CAPMoEModel.from_pretrained(tmp_path)
    del weights[key]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {key}"):
        CAPMoEModel.from_pretrained(tmp_path)
