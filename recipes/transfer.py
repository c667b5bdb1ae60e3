"""Does a placement learned on one workload serve another? Source by target, on the embedded model and on real DeepSeek traces.

    python recipes/transfer.py

Hardware: 2 CPU cores, about 1 minute. One process plays all ranks. Every workload is split in two by requests: placements are
learned on the first part and scored on the second, also for their own workload. "all mixed" is learned on equal parts of each.
The real traces (two tasks of DeepSeek-V2-Lite, halves by tokens) are read where the data folder holds them.
Prints two tables, devices per token and load imbalance in one cell, and writes report.json and pictures to --output_dir. Expect
a placement of another workload to send 5 to 9 % more than the own one on the embedded model (12 to 28 % on the real traces), one
of all mixed 1 to 5 % more, and Default 30 to 60 % more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPMoEModel, ExpertLayout, Placer, RoutingTrace, Topology
from cap_hf.corpora import find_data_dir, load_texts
from cap_hf.models import embedded_model
from cap_hf.recorder import record_texts
from cap_hf.report import markdown_table, provenance

WORKLOADS = ("chat", "arxiv", "humaneval")
Halves = tuple[RoutingTrace, RoutingTrace]
Point = tuple[float, float]


@dataclass
class TransferArguments:
    """Options of the recipe."""

    model: str = field(default=str(embedded_model()), metadata={"help": "checkpoint folder or Hub name"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local corpora and traces"})
    num_tokens: int = field(default=30_000, metadata={"help": "tokens to record of each workload, half to learn on, half to score on"})
    num_ranks: int = field(default=8, metadata={"help": "devices"})
    method: str = field(default="connectivity", metadata={"help": "placement method"})
    seed: int = field(default=0, metadata={"help": "of the order of requests and of the placement"})
    output_dir: str = field(default="build/transfer", metadata={"help": "where report.json and the pictures go"})


def recorded_halves(args: TransferArguments) -> dict[str, Halves]:
    """Workload -> (learn, score), every second request each, in an order shuffled once."""
    model, tokenizer = CAPMoEModel.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    halves = {}
    for name in WORKLOADS:
        texts = load_texts(name, "train", args.data_dir)
        order = np.random.default_rng(args.seed).permutation(len(texts))
        trace = record_texts(model, tokenizer, [texts[i] for i in order], args.num_tokens)
        halves[name] = trace.select(slice(0, None, 2)), trace.select(slice(1, None, 2))
    return halves


def deepseek_halves(folder: Path) -> dict[str, Halves]:
    """Task -> (learn, score) of DeepSeek-V2-Lite, first and second half of the tokens."""
    halves = {}
    for task in ("intent", "summary"):
        with np.load(folder / f"esft_{task}_topk.npz", allow_pickle=False) as arrays:
            trace = RoutingTrace(arrays["topk_ids"].astype(int), 64, None, arrays["layers"], arrays["seq_lens"])
        middle = trace.num_tokens // 2
        halves[task] = trace.select_tokens(slice(0, middle)), trace.select_tokens(slice(middle, None))
    return halves


def cross(halves: dict[str, Halves], placer: Placer) -> dict[str, dict[str, Point]]:
    """Source -> target -> (devices per token, load imbalance)."""
    sources = {name: learn for name, (learn, _) in halves.items()}
    share = min(learn.num_tokens for learn in sources.values()) // len(sources)
    sources["all mixed"] = RoutingTrace.concatenate([learn.select_tokens(slice(0, share)) for learn in sources.values()])
    any_trace = sources["all mixed"]
    layouts = {f"learned on {name}": placer.place(trace) for name, trace in sources.items()}
    layouts["Default (id order)"] = ExpertLayout.sequential(
        any_trace.num_layers, any_trace.num_experts, placer.topology, any_trace.layer_ids
    )
    measured = {name: {target: layout.metrics(score) for target, (_, score) in halves.items()} for name, layout in layouts.items()}
    return {name: {target: (m.devices_per_token, m.load_imbalance) for target, m in row.items()} for name, row in measured.items()}


def table(cells: dict[str, dict[str, Point]]) -> str:
    """Devices per token / load imbalance, source by target."""
    return markdown_table([{"": name} | {t: f"{d:.3f} / {b:.2f}" for t, (d, b) in row.items()} for name, row in cells.items()])


def plot(cells: dict[str, dict[str, Point]], title: str, path: Path) -> None:
    """Two heat maps with their values written in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.6 * len(cells) + 1.8), layout="constrained", sharey=True)
    targets = list(next(iter(cells.values())))
    for index, (axis, label) in enumerate(zip(axes, ("devices per token", "load imbalance"), strict=True)):
        values = np.array([[row[target][index] for target in targets] for row in cells.values()])
        axis.imshow(values, cmap="viridis_r", aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            dark = value > (values.min() + values.max()) / 2
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
        axis.set(title=f"{title}: {label}", xlabel="scored on", xticks=range(len(targets)), yticks=range(len(cells)))
        axis.set_xticklabels(targets)
        axis.set_yticklabels(list(cells))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    (args,) = HfArgumentParser(TransferArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    placer, out = Placer(Topology(args.num_ranks), args.method, args.seed), Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    results = {Path(args.model).name: cross(recorded_halves(args), placer)}
    folder = find_data_dir(args.data_dir)
    traces = folder / "traces" / "deepseek_v2_lite" if folder else None
    if traces and traces.is_dir():
        results["DeepSeek-V2-Lite"] = cross(deepseek_halves(traces), placer)
    else:
        print("DeepSeek-V2-Lite is left out: there is no traces/deepseek_v2_lite in a data folder (--data_dir)")
    for name, cells in results.items():
        print(f"\n{name}, {args.num_ranks} ranks: devices per token / load imbalance\n\n{table(cells)}")
        plot(cells, name, out / f"{name}.png")
    (out / "report.json").write_text(json.dumps({"arguments": vars(args), "results": results, **provenance()}, indent=1) + "\n")
    print(f"\nwritten to {out}/: report.json, {', '.join(f'{name}.png' for name in results)}")


if __name__ == "__main__":
    main()
