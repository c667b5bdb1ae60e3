"""What recording costs: forwards of Transformers, of the wrapped model, and of the wrapped model while recording.

    python recipes/bench_recorder.py        # or: make bench

Hardware: 1 CPU core, about a minute. Expect both ratios within 1.03, give or take
0.02 on a shared machine. Variants take turns in one run, and the ratio is
the median over rounds of paired times, so that a busy machine disturbs all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPMoEModel, RoutingRecorder
from cap_hf.corpora import load_texts, token_blocks
from cap_hf.models import embedded_model
from cap_hf.report import markdown_table


@dataclass
class BenchArguments:
    """Options of the benchmark."""

    model: str = field(default="tiny_qwen3_moe", metadata={"help": "tiny_qwen3_moe or tiny_deepseek_v2"})
    rounds: int = field(default=45, metadata={"help": "paired measurements"})


def main() -> None:
    (args,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    path = embedded_model(args.model)
    ids = torch.from_numpy(token_blocks(AutoTokenizer.from_pretrained(path), load_texts("python", "test"), 512, 4))
    transformers = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="grouped_mm")
    wrapped = CAPMoEModel.from_pretrained(path, dtype=torch.float32)

    def recording(**inputs: Any) -> None:
        with RoutingRecorder(wrapped):
            wrapped(**inputs)

    variants: dict[str, Callable[..., Any]] = {
        "Transformers, grouped_mm": transformers,
        "CAPMoEModel": wrapped,
        "CAPMoEModel, recording": recording,
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    with torch.no_grad():
        for index in tqdm(range(args.rounds + 1), desc="rounds"):
            turn = index % len(variants)  # each goes first equally often
            for name in [*variants][turn:] + [*variants][:turn]:
                start = time.perf_counter()
                variants[name](input_ids=ids, use_cache=False)
                if index:  # round 0 warms up
                    seconds[name].append(time.perf_counter() - start)
    base = np.array(next(iter(seconds.values())))
    rows = [
        {
            "forward of 4 x 512 tokens": name,
            "median ms": f"{np.median(times) * 1e3:.1f}",
            "ratio": f"{np.median(np.array(times) / base):.3f}",
        }
        for name, times in seconds.items()
    ]
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
