"""How long does a placement stay good? 16 windows of a chat workload, placements learned in three of them and scored in all.

    python recipes/stability.py

Hardware: 2 CPU cores, about 1 minute. One process plays all ranks. Requests are shuffled first (--seed), since the files hold one
source after the other and a server sees a mix. Prints one table and writes report.json and a picture to --output_dir. Expect
devices per token within 3 % of their mean over the windows that a layout was not learned in, a quarter below Default's, and load
imbalance within 18 % (Default: 6.5 %).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPMoEModel, ExpertLayout, Placer, RoutingTrace, Topology
from cap_hf.corpora import load_texts
from cap_hf.models import embedded_model
from cap_hf.recorder import record_texts
from cap_hf.report import markdown_table, provenance

MEASURES = {"devices_per_token": "devices per token", "load_imbalance": "load imbalance"}


@dataclass
class StabilityArguments:
    """Options of the recipe."""

    model: str = field(default=str(embedded_model()), metadata={"help": "checkpoint folder or Hub name"})
    corpus: str = field(default="chat", metadata={"help": "corpus to cut into windows"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local corpora"})
    num_windows: int = field(default=16, metadata={"help": "windows, each of as many consecutive requests"})
    num_ranks: int = field(default=8, metadata={"help": "devices"})
    method: str = field(default="connectivity", metadata={"help": "placement method"})
    seed: int = field(default=0, metadata={"help": "of the order of requests and of the placement"})
    output_dir: str = field(default="build/stability", metadata={"help": "where report.json and stability.png go"})


def windows_of(args: StabilityArguments) -> list[RoutingTrace]:
    """Routing of each window, in order."""
    texts = load_texts(args.corpus, "train", args.data_dir) + load_texts(args.corpus, "test", args.data_dir)
    order = np.random.default_rng(args.seed).permutation(len(texts))
    model = CAPMoEModel.from_pretrained(args.model)
    trace = record_texts(model, AutoTokenizer.from_pretrained(args.model), [texts[i] for i in order], num_tokens=10**9)
    bounds = np.arange(args.num_windows + 1) * trace.num_requests // args.num_windows
    return [trace.select(slice(start, end)) for start, end in zip(bounds, bounds[1:], strict=False)]


def row(name: str, series: dict[str, list[float]], own: int | None) -> dict[str, str]:
    """One line of the table: the window that a layout was learned in, and the others."""
    cells = {"layout": name}
    for measure, label in MEASURES.items():
        others = np.delete(series[measure], [] if own is None else own)
        cells[f"{label}: own window"] = "" if own is None else f"{series[measure][own]:.3f}"
        cells[f"{label}: others"] = f"{others.mean():.3f} ({others.min():.3f}-{others.max():.3f})"
        cells[f"{label}: most off their mean"] = f"{np.abs(others / others.mean() - 1).max():.1%}"
    return cells


def plot(series: dict[str, dict[str, list[float]]], path: Path) -> None:
    """One panel per measure, one line per layout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MEASURES), figsize=(10, 3.8), layout="constrained")
    for axis, (measure, label) in zip(axes, MEASURES.items(), strict=True):
        for (name, values), marker in zip(series.items(), "osD^", strict=False):
            axis.plot(range(1, len(values[measure]) + 1), values[measure], marker=marker, markersize=4, linewidth=1, label=name)
        axis.set(xlabel="window", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    (args,) = HfArgumentParser(StabilityArguments).parse_args_into_dataclasses()
    if args.num_windows < 3:
        raise SystemExit(f"--num_windows is {args.num_windows}; it must be 3 or more: layouts come from the first, middle and last")
    logging.disable_progress_bar()
    placer, out = Placer(Topology(args.num_ranks), args.method, args.seed), Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    windows = windows_of(args)
    learned_in = {f"learned in window {i + 1}": i for i in (0, args.num_windows // 2, args.num_windows - 1)}
    first = windows[0]
    layouts = {"Default (id order)": ExpertLayout.sequential(first.num_layers, first.num_experts, placer.topology, first.layer_ids)}
    layouts |= {name: placer.place(windows[i]) for name, i in learned_in.items()}
    series = {
        name: {measure: [getattr(layout.metrics(window), measure) for window in windows] for measure in MEASURES}
        for name, layout in layouts.items()
    }
    sizes = [window.num_tokens for window in windows]
    requests = f"{first.num_requests} requests ({min(sizes):,}-{max(sizes):,} tokens)"
    print(f"\n{args.num_windows} windows of {requests}, {args.num_ranks} ranks\n")
    print(markdown_table([row(name, values, learned_in.get(name)) for name, values in series.items()]))
    (out / "report.json").write_text(json.dumps({"arguments": vars(args), "windows": series, **provenance()}, indent=1) + "\n")
    plot(series, out / "stability.png")
    print(f"\nwritten to {out}/: report.json, stability.png")


if __name__ == "__main__":
    main()
