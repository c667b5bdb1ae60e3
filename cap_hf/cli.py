"""Command line ``cap-hf``: trace a model's routing, place its experts, look at the results.

Every command prints a table for people, or with ``--json`` an object for programs; errors are one line and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cap_hf._files import format_of
from cap_hf.config import CAPConfig
from cap_hf.layout import ExpertLayout
from cap_hf.placement import PlacementSpectrum, Placer
from cap_hf.placement.placer import METHODS
from cap_hf.replicated import ReplicatedLayout
from cap_hf.report import markdown_table
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

__all__ = ["main"]


def _topology(args: argparse.Namespace) -> Topology:
    return Topology(args.num_ranks, args.ranks_per_node or 0, args.inter_node_cost)


def _metrics(layout: ExpertLayout | ReplicatedLayout, trace: RoutingTrace) -> dict[str, float]:
    measured = layout.metrics(trace)
    names = ("devices_per_token", "nodes_per_token", "load_imbalance", "communication_cost")
    return {name: round(getattr(measured, name), 4) for name in names}


def _show(args: argparse.Namespace, result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    if args.json:
        print(json.dumps(result))
    else:
        print(markdown_table([{key: str(value) for key, value in row.items()} for row in rows]))
        if "written" in result:
            print(f"written to {result['written']}")


def _trace(args: argparse.Namespace) -> None:
    from cap_hf.corpora import load_texts

    topology = _topology(args)
    CAPConfig(pruning=args.pruning, prune_threshold=args.threshold)  # fails before anything is read
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("cap-hf trace runs as one process, which plays all ranks; launch recipes/place.py to trace on several")
    if args.num_tokens < 1:
        raise ValueError(f"--num-tokens is {args.num_tokens}; it must be 1 or more")
    texts = _read_texts(args.text_file) if args.text_file else load_texts(args.corpus, "train", args.data_dir)
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    from cap_hf.families import family_of
    from cap_hf.modeling import CAPMoEModel
    from cap_hf.recorder import record_texts

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model_config = AutoConfig.from_pretrained(args.model)
    family = family_of(model_config)
    layer_ids = family.moe_layer_ids(model_config)
    layout = ExpertLayout.sequential(len(layer_ids), family.num_experts(model_config), topology, layer_ids)
    config = CAPConfig(layout=layout, pruning=args.pruning, prune_threshold=args.threshold)
    model = CAPMoEModel.from_pretrained(args.model, cap_config=config)
    trace = record_texts(model, AutoTokenizer.from_pretrained(args.model), texts, args.num_tokens, progress=not args.json)
    trace.save(args.output)
    _show(args, {**_facts(trace), "written": args.output}, [_facts(trace)])


def _read_texts(path: str) -> list[str]:
    """Texts of a UTF-8 file, separated by empty lines."""
    try:
        return Path(path).read_text(encoding="utf-8").split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text file {path} cannot be read as UTF-8 ({error}); give another file") from error


def _placer(args: argparse.Namespace) -> Placer:
    return Placer(_topology(args), args.method, args.seed, args.num_starts, args.time_limit, progress=not args.json)


def _place(args: argparse.Namespace) -> None:
    trace, placer = RoutingTrace.load(args.trace), _placer(args)
    if args.redundant_slots < 0:
        raise ValueError(f"--redundant-slots is {args.redundant_slots}; it must be 0 or more")
    placed = placer.place(trace)
    layouts: dict[str, ExpertLayout | ReplicatedLayout] = {
        "Default (id order)": ExpertLayout.sequential(trace.num_layers, trace.num_experts, placer.topology, trace.layer_ids),
        args.method: placed,
    }
    result: ExpertLayout | ReplicatedLayout = placed
    if args.redundant_slots:
        from cap_hf.placement.replicas import add_replicas  # compiled code, loaded by those who use it

        result = layouts[f"{args.method}, {args.redundant_slots} redundant slots per rank"] = add_replicas(
            trace, placed, args.redundant_slots
        )
    result.save(args.output)
    rows = [{"layout": name, **_metrics(each, trace)} for name, each in layouts.items()]
    _show(args, {"layout": result.fingerprint, **_metrics(result, trace), "written": args.output}, rows)


def _spectrum(args: argparse.Namespace) -> None:
    trace = RoutingTrace.load(args.trace)
    spectrum = _placer(args).spectrum(trace, args.num_placements)
    spectrum.save(args.output)
    rows = [{"placement": index, **_metrics(layout, trace)} for index, layout in enumerate(spectrum)]
    _show(args, {"placements": rows, "written": args.output}, rows)


def _facts(value: RoutingTrace | ExpertLayout | ReplicatedLayout) -> dict[str, Any]:
    if isinstance(value, RoutingTrace):
        pruned = float((value.expert_ids < 0).mean())
        facts = {"layers": value.num_layers, "experts": value.num_experts, "tokens": value.num_tokens, "top k": value.top_k}
        return {**facts, "requests": value.num_requests, "slots pruned": f"{pruned:.1%}"}
    counts = value.hosts.sum(axis=1) if isinstance(value, ReplicatedLayout) else value.experts_per_rank()
    facts = {"layers": value.num_layers, "experts": value.num_experts, "ranks": value.num_ranks, "nodes": value.topology.num_nodes}
    return {**facts, "experts per rank": f"{counts.min()}-{counts.max()}", "fingerprint": value.fingerprint}


def _inspect(args: argparse.Namespace) -> None:
    readers: dict[str, Callable[[str], Any]] = {
        "trace": RoutingTrace.load,
        "layout": ExpertLayout.load,
        "replicated_layout": ReplicatedLayout.load,
        "spectrum": PlacementSpectrum.load,
    }
    kind = format_of(args.file)
    if kind not in readers:
        raise ValueError(f"{args.file} holds format {kind!r}; give one of: {', '.join(readers)}")
    content = readers[kind](args.file)
    trace = RoutingTrace.load(args.trace) if args.trace else None
    rows = []
    for each in content if isinstance(content, PlacementSpectrum) else [content]:
        measured = _metrics(each, trace) if trace is not None and not isinstance(each, RoutingTrace) else {}
        rows.append({**_facts(each), **measured})
    _show(args, {"kind": kind, "content": rows}, rows)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-ranks", type=int, required=True, help="devices that share the experts")
    parser.add_argument("--ranks-per-node", type=int, help="devices in one node (default: all)")
    parser.add_argument("--inter-node-cost", type=float, default=1.0, help="cost of a row to another node, 1 inside a node (default: 1)")


def _add_search(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("trace", help="trace file")
    _add_machine(parser)
    parser.add_argument("--method", default="connectivity", choices=METHODS, help="placement method (default: connectivity)")
    parser.add_argument("--num-starts", type=int, default=2, help="annealings per layer, the best counts (connectivity; default: 2)")
    parser.add_argument("--time-limit", type=float, help="seconds after which the best so far is taken (connectivity; default: none)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices (default: 0)")
    parser.add_argument("--output", default=output, help=f"file to write (default: {output})")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cap-hf", description="Communication-aware expert placement for Mixture-of-Experts models.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], None], summary: str, example: str) -> argparse.ArgumentParser:
        shape = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=summary, description=summary, epilog=f"example:\n  {example}", formatter_class=shape)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.set_defaults(run=run)
        return sub

    trace = add(
        "trace", _trace, "record which experts a model's tokens use", "cap-hf trace --model Qwen/Qwen3-30B-A3B --corpus gsm8k --num-ranks 8"
    )
    trace.add_argument("--model", required=True, help="checkpoint folder or Hub name")
    trace.add_argument("--corpus", default="wikitext", help="corpus by name (default: wikitext)")
    trace.add_argument("--text-file", help="a UTF-8 file of texts separated by empty lines, instead of a corpus")
    trace.add_argument("--data-dir", help="folder of local corpora")
    trace.add_argument("--num-tokens", type=int, default=8000, help="tokens to record (default: 8000)")
    trace.add_argument(
        "--pruning", default="none", choices=["none", "expert", "device"], help="rule in force while tracing (default: none)"
    )
    trace.add_argument("--threshold", type=float, default=0.0, help="p of the rule (default: 0)")
    trace.add_argument("--output", default="trace.safetensors", help="file to write (default: trace.safetensors)")
    _add_machine(trace)
    place = add("place", _place, "one layout from a trace", "cap-hf place trace.safetensors --num-ranks 8")
    _add_search(place, "layout.json")
    place.add_argument("--redundant-slots", type=int, default=0, help="copies of experts that each rank may hold besides (default: 0)")
    spectrum = add(
        "spectrum",
        _spectrum,
        "layouts from least traffic to best balance",
        "cap-hf spectrum trace.safetensors --num-ranks 8 --num-placements 8",
    )
    _add_search(spectrum, "spectrum.json")
    spectrum.add_argument("--num-placements", type=int, default=8, help="layouts in the spectrum (default: 8)")
    inspect = add(
        "inspect", _inspect, "what a trace, layout or spectrum file holds", "cap-hf inspect layout.json --trace trace.safetensors"
    )
    inspect.add_argument("file", help="trace, layout, replicated layout or spectrum")
    inspect.add_argument("--trace", help="trace to measure layouts on")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"cap-hf {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
