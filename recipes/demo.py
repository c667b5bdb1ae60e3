"""The four steps on an embedded model and real text: trace with pruning on, place, adjust, measure and choose.

    accelerate launch --use_deepspeed --num_processes 4 --zero_stage 1 recipes/demo.py       # or: make demo

Hardware: 2 CPU cores, about two minutes. Prints one table and writes report.json and two pictures to --output_dir. Text
comes from --data_dir (default: $CAP_HF_DATA or ../shared/data) or, without one, from Python's own library source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, PlacementSpectrum, Placer, Topology
from cap_hf.corpora import find_data_dir, load_texts, token_blocks
from cap_hf.models import embedded_model
from cap_hf.parallel.groups import require_world_size
from cap_hf.profiler import HeldOutResult, evaluate_held_out, own_share, profile_layouts
from cap_hf.recorder import record_texts
from cap_hf.report import markdown_table, provenance

COMMAND = "accelerate launch --use_deepspeed --num_processes 4 --zero_stage 1 recipes/demo.py"


@dataclass
class DemoArguments:
    """Options of the demo."""

    model: str = field(default="tiny_qwen3_moe", metadata={"help": "tiny_qwen3_moe or tiny_deepseek_v2"})
    threshold: float = field(default=0.3, metadata={"help": "p: share of a token's gate score that may be dropped"})
    num_placements: int = field(default=5, metadata={"help": "candidate layouts to measure"})
    calibration_tokens: int = field(default=8000, metadata={"help": "tokens to trace"})
    held_out_blocks: int = field(default=96, metadata={"help": "256-token blocks of held-out text"})
    corpora: str | None = field(default=None, metadata={"help": "comma-separated names; default: what is available offline"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local corpora"})
    output_dir: str = field(default="build/demo", metadata={"help": "where report.json and the pictures go"})


def mixed_texts(corpora: list[str], split: str, data_dir: str | None) -> list[str]:
    """Documents of several corpora, in turn, so that every prefix is a mixture."""
    columns = [load_texts(name, split, data_dir) for name in corpora]
    return [text for text in chain.from_iterable(zip_longest(*columns)) if text]


def table_row(name: str, result: HeldOutResult) -> dict[str, str]:
    """One line of the demo's table."""
    return {
        "configuration": name,
        "devices/token": f"{result.devices_per_token:.2f}",
        "imbalance": f"{result.load_imbalance:.2f}",
        "bytes sent/token": f"{result.bytes_per_token:,.0f}",
        "perplexity": f"{result.perplexity:.2f}",
        "tokens/s": f"{result.tokens_per_s:,.0f}",
        "peak MB/rank": f"{max(result.peak_memory_bytes) / 2**20:.0f}",
    }


def read_text(args: DemoArguments, tokenizer: Any, rank: int, num_ranks: int) -> tuple[list[str], list[str], Any, Any]:
    """Names of the corpora, calibration texts, and this rank's batches of calibration and of held-out text."""
    offline = ["wikitext", "gsm8k", "arxiv", "python"] if find_data_dir(args.data_dir) else ["python"]
    names = args.corpora.split(",") if args.corpora else offline
    texts = {split: mixed_texts(names, split, args.data_dir) for split in ("train", "test")}
    sizes = {"train": 16 * num_ranks, "test": args.held_out_blocks}
    batches = {
        split: own_share(token_blocks(tokenizer, texts[split], 256, size), rank, num_ranks, batch_size=4) for split, size in sizes.items()
    }
    return names, texts["train"], batches["train"], batches["test"]


def main() -> None:
    (args,) = HfArgumentParser(DemoArguments).parse_args_into_dataclasses()
    num_ranks = require_world_size(lambda size: size > 1, COMMAND)
    if args.num_placements < 1:
        raise SystemExit(f"--num_placements is {args.num_placements}; it must be 1 or more")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)  # fails now rather than at the end
    topology, rule = Topology(num_ranks), "device" if args.threshold else "none"
    logging.disable_progress_bar()
    config = CAPConfig(pruning="expert" if args.threshold else "none", prune_threshold=args.threshold)
    model = CAPMoEModel.from_pretrained(embedded_model(args.model), cap_config=config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(args.model))
    with model.group.all_or_none():
        names, calibration, calibration_batches, batches = read_text(args, tokenizer, model.group.rank, num_ranks)

    trace = record_texts(model, tokenizer, calibration, args.calibration_tokens)  # step 1, pruning on: by experts, free of any layout
    greedy = Placer(topology, "greedy").place(trace)
    placer = Placer(topology)
    found = model.group.from_first(lambda: placer.spectrum(trace, args.num_placements).to_dict())  # steps 2 and 3
    spectrum = PlacementSpectrum.from_dict(found)
    model.set_pruning(rule, args.threshold)
    timings = profile_layouts(model, spectrum, calibration_batches)  # step 4
    chosen = min(range(len(timings)), key=lambda index: timings[index].forward_s)

    rows: list[tuple[str, ExpertLayout, float]] = [
        ("Default (id order)", ExpertLayout.sequential(trace.num_layers, trace.num_experts, topology, trace.layer_ids), 0.0),
        ("the paper's greedy", greedy, 0.0),
        ("least traffic (placement 0)", spectrum[0], 0.0),
        (f"chosen placement ({chosen} of 0-{len(spectrum) - 1})", spectrum[chosen], 0.0),
        (f"chosen placement, p = {args.threshold}", spectrum[chosen], args.threshold),
    ]
    results: dict[str, HeldOutResult] = {}
    for name, layout, threshold in rows:
        model.apply_layout(layout)
        model.set_pruning(rule if threshold else "none", threshold)
        results[name] = evaluate_held_out(model, batches)
    if model.group.rank == 0:
        write_report(args, names, trace, {name: layout for name, layout, _ in rows}, results, timings, chosen)


def write_report(
    args: Any, names: list[str], trace: Any, layouts: dict[str, Any], results: dict[str, HeldOutResult], timings: list[Any], chosen: int
) -> None:
    """Print the table, write report.json, and draw the pictures where matplotlib is installed."""
    out = Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    held_out = next(iter(results.values())).trace
    tokens = f"{trace.num_tokens:,} traced and {held_out.num_tokens:,} held-out tokens of {', '.join(names)}"
    print(f"\n{args.model} on {tokens}; {len(timings)} layouts measured\n")
    print(markdown_table([table_row(name, result) for name, result in results.items()]))
    numbers = {name: {key: value for key, value in vars(result).items() if key != "trace"} for name, result in results.items()}
    profile = [
        {"layout": timing.layout.fingerprint, "forward_s": timing.forward_s, "tokens_per_s": timing.tokens_per_s} for timing in timings
    ]
    layouts_used = {name: layout.to_dict() for name, layout in layouts.items()}
    report = {
        "arguments": vars(args),
        "corpora": names,
        "results": numbers,
        "profile": profile,
        "chosen": chosen,
        "layouts": layouts_used,
        **provenance(),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    written = ["report.json"]
    try:
        from cap_hf.plots import plot_coactivation, plot_tradeoff

        pair = dict(zip(["before: id order", "the paper's greedy", "after: least traffic"], list(layouts.values())[:3], strict=True))
        plot_coactivation(held_out, pair, out / "coactivation.png")
        points = [timing.layout.metrics(held_out) for timing in timings]
        series = {"spectrum": [(m.devices_per_token, m.load_imbalance) for m in points]}
        series |= {
            name: [(results[name].devices_per_token, results[name].load_imbalance)] for name in (list(results)[0], list(results)[-1])
        }
        plot_tradeoff(series, out / "tradeoff.png", series["spectrum"][chosen])
        written += ["coactivation.png", "tradeoff.png"]
    except ImportError as error:
        print(f"\nno pictures: {error}")
    print(f"\nwritten to {out}/: {', '.join(written)}")


if __name__ == "__main__":
    main()
