"""Trace a model on real text with pruning on, and save the trace and a spectrum of layouts for the ranks that run.

The trace is pruned by experts, not by devices: device pruning keeps what shares a rank in the layout it runs under, so its
trace repeats that layout. On the DeepSeek-V2-Lite traces this saves 1 to 2 % of the rows that device pruning sends later.

    accelerate launch --use_deepspeed --num_processes 4 --zero_stage 1 recipes/place.py --model Qwen/Qwen3-30B-A3B --corpus gsm8k

Hardware: as many devices as hold the model; the embedded model (the default) needs 2 CPU cores and half a minute. Expect
placement 0 to visit about a quarter fewer devices than experts in id order, and the last one to be the best balanced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer, HfArgumentParser

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, Placer, Topology
from cap_hf.corpora import load_texts
from cap_hf.models import embedded_model
from cap_hf.parallel.groups import require_world_size
from cap_hf.recorder import record_texts
from cap_hf.report import layout_row, markdown_table

COMMAND = "accelerate launch --use_deepspeed --num_processes 4 --zero_stage 1 recipes/place.py"


@dataclass
class PlaceArguments:
    """Options of the recipe."""

    model: str = field(default=str(embedded_model()), metadata={"help": "checkpoint folder or Hub name"})
    corpus: str = field(default="python", metadata={"help": "corpus to trace"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local corpora"})
    threshold: float = field(default=0.3, metadata={"help": "p of expert pruning while tracing; 0 for none"})
    num_tokens: int = field(default=8000, metadata={"help": "tokens to trace"})
    num_placements: int = field(default=8, metadata={"help": "layouts in the spectrum"})
    ranks_per_node: int = field(default=0, metadata={"help": "ranks in one node; 0 for all"})
    inter_node_cost: float = field(default=1.0, metadata={"help": "cost of a row to another node, 1 inside a node"})
    output_dir: str = field(default="build/place", metadata={"help": "where trace.safetensors and spectrum.json go"})


def main() -> None:
    (args,) = HfArgumentParser(PlaceArguments).parse_args_into_dataclasses()
    topology = Topology(require_world_size(lambda size: size > 1, COMMAND), args.ranks_per_node, args.inter_node_cost)
    config = CAPConfig(pruning="expert" if args.threshold else "none", prune_threshold=args.threshold)
    model = CAPMoEModel.from_pretrained(args.model, cap_config=config)
    trace = record_texts(model, AutoTokenizer.from_pretrained(args.model), load_texts(args.corpus, "train", args.data_dir), args.num_tokens)
    if model.group.rank == 0:
        spectrum = Placer(topology).spectrum(trace, args.num_placements)
        default = ExpertLayout.sequential(trace.num_layers, trace.num_experts, topology, trace.layer_ids)
        trace.save(Path(args.output_dir, "trace.safetensors"))
        spectrum.save(Path(args.output_dir, "spectrum.json"))
        spectrum[0].save(Path(args.output_dir, "layout.json"))
        named = {"Default (id order)": default} | {f"placement {index}": layout for index, layout in enumerate(spectrum)}
        print(markdown_table([layout_row(name, layout.metrics(trace)) for name, layout in named.items()]))
        print(f"\nwritten to {args.output_dir}/: trace.safetensors, spectrum.json, layout.json (placement 0)")


if __name__ == "__main__":
    main()
