"""Each rank reads its own experts only: peak anonymous memory on a 1.5 GB checkpoint, real processes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from ranks import run_ranks
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, Topology
from cap_hf.profiler import PeakMemory, anonymous_bytes

HIDDEN, WIDTH, EXPERTS, LAYERS = 1024, 512, 80, 3


def write_checkpoint(folder: Path) -> int:
    """Per-expert safetensors in one file per layer; expert e is filled with e / 1000. Returns its bytes."""
    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        moe_intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=8, intermediate_size=1024,
    )  # fmt: skip
    with torch.device("meta"):
        dense = {key: value for key, value in AutoModelForCausalLM.from_config(config).state_dict().items() if ".experts." not in key}
    shards = [{key: torch.full(value.shape, 0.01) for key, value in dense.items()}]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        shards.append(
            {f"{prefix}.{e}.{part}.weight": torch.full(shape, e / 1000) for e in range(EXPERTS) for part, shape in shapes.items()}
        )
    weight_map = {}
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"model-{index}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, f"model-{index}.safetensors")
    total = sum(tensor.numel() * 4 for shard in shards for tensor in shard.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], "float32"
    config.save_pretrained(folder)
    return total


def rank_load(folder: str) -> tuple[int, int, list[int]]:
    """Peak above the start, bytes of what the rank must hold, and the experts found in the first layer."""
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401  # the interpreter's own share comes first

    ranks = [[(expert // 3) % 2 for expert in range(EXPERTS)]] * LAYERS  # no contiguous range
    layout = ExpertLayout(ranks, Topology(2))
    before = anonymous_bytes()
    with PeakMemory(interval_s=0.002) as memory:
        model = CAPMoEModel.from_pretrained(folder, cap_config=CAPConfig(layout=layout))
    held = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    found = (model.model.model.layers[0].mlp.experts.down_proj[:, 0, 0] * 1000).round().int().tolist()
    return memory.peak_bytes - before, held, found


def test_peak_memory_is_the_dense_part_and_the_own_experts(tmp_path: Path) -> None:
    total = write_checkpoint(tmp_path)
    assert total > 1.5e9
    for rank, (peak, held, found) in enumerate(run_ranks(rank_load, 2, str(tmp_path))):
        assert found == [expert for expert in range(EXPERTS) if (expert // 3) % 2 == rank]
        assert held < 0.6 * total
        assert peak <= 1.15 * held, f"rank {rank} peaked at {peak / 2**20:.0f} MB for {held / 2**20:.0f} MB held"
