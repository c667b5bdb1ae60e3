"""Generate text on several ranks, each with its own prompts, under a layout and a pruning threshold.

    accelerate launch --use_deepspeed --num_processes 4 --zero_stage 1 recipes/generate.py --layout build/place/layout.json --threshold 0.3

Hardware: as many devices as hold the model; the embedded model (the default) needs 2 CPU cores and half a minute. Expect
the bytes sent per token to fall with a better layout and a higher threshold, and the text to stay as it was at p = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer, HfArgumentParser

from cap_hf import CAPConfig, CAPMoEModel
from cap_hf.models import embedded_model
from cap_hf.parallel.groups import require_world_size

COMMAND = "accelerate launch --use_deepspeed --num_processes 4 --zero_stage 1 recipes/generate.py"
PROMPTS = [
    "def fibonacci(n):\n",
    "Question: Tom has 12 marbles and loses 5.",
    "= Lighthouse =\n The lighthouse",
    "We prove that the spectrum of",
]


@dataclass
class GenerateArguments:
    """Options of the recipe."""

    model: str = field(default=str(embedded_model()), metadata={"help": "checkpoint folder or Hub name"})
    layout: str | None = field(default=None, metadata={"help": "layout file; default: experts in id order"})
    threshold: float = field(default=0.0, metadata={"help": "p of device pruning"})
    prompts: str | None = field(default=None, metadata={"help": "a UTF-8 file with one prompt per line; default: four samples"})
    max_new_tokens: int = field(default=32, metadata={"help": "tokens to generate per prompt"})


def main() -> None:
    (args,) = HfArgumentParser(GenerateArguments).parse_args_into_dataclasses()
    size = require_world_size(lambda size: size > 1, COMMAND)
    config = CAPConfig(layout=args.layout, pruning="device" if args.threshold else "none", prune_threshold=args.threshold)
    model = CAPMoEModel.from_pretrained(args.model, cap_config=config)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    with model.group.all_or_none():
        prompts = Path(args.prompts).read_text(encoding="utf-8").splitlines() if args.prompts else PROMPTS
        if len(prompts) < size:
            raise ValueError(f"{len(prompts)} prompts for {size} ranks; give {size} or more")
    inputs = tokenizer(prompts[model.group.rank :: size], return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    model.traffic.reset()
    output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
    counts = torch.tensor([model.traffic.bytes_sent, model.traffic.token_visits / model.layout.num_layers], dtype=torch.float64)
    sent, tokens = model.group.all_gather(counts).sum(dim=0).tolist()
    for rank in range(size):  # one rank after the other, so that texts do not mix
        model.group.all_gather(torch.zeros(1))
        if rank == model.group.rank:
            for text in tokenizer.batch_decode(output, skip_special_tokens=True):
                print(f"--- rank {rank}\n{text}", flush=True)
    model.group.all_gather(torch.zeros(1))
    if model.group.rank == 0:
        print(f"--- {sent / tokens:,.0f} bytes sent per token, all layers", flush=True)


if __name__ == "__main__":
    main()
