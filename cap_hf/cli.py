"""Command line ``cap-hf``: trace a model's routing, place its experts, look at the results, measure what pruning costs.

Every command prints a table for people, or with ``--json`` an object for programs; errors are one line and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
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
    from cap_hf.recorder import record_texts

    config = CAPConfig(layout=_sequential(args.model, topology), pruning=args.pruning, prune_threshold=args.threshold)
    model, tokenizer = _load(args.model, config)
    trace = record_texts(model, tokenizer, texts, args.num_tokens, progress=not args.json)
    trace.save(args.output)
    _show(args, {**_facts(trace), "written": args.output}, [_facts(trace)])


def _sequential(model: str, topology: Topology) -> ExpertLayout:
    """Experts of a checkpoint in id order."""
    _check_model(model)
    from transformers import AutoConfig

    from cap_hf.families import family_of

    config = AutoConfig.from_pretrained(model)
    family = family_of(config)
    layer_ids = family.moe_layer_ids(config)
    return ExpertLayout.sequential(len(layer_ids), family.num_experts(config), topology, layer_ids)


def _check_model(model: str) -> None:
    """A name that can only be meant as a path must exist; others may be on the Hub."""
    if (model.startswith((".", "/", "~")) or model.count("/") != 1 and "/" in model) and not Path(model).is_dir():
        raise ValueError(f"model folder {model!r} does not exist; give a checkpoint folder or a name on the Hub")


def _load(model: str, config: CAPConfig) -> tuple[Any, Any]:
    """The model, in the type of its checkpoint and on a GPU where there is one, and its tokenizer."""
    _check_model(model)
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from cap_hf.modeling import CAPMoEModel

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    place = {"device_map": {"": torch.cuda.current_device()}} if torch.cuda.is_available() else {}
    return CAPMoEModel.from_pretrained(model, cap_config=config, dtype="auto", **place), AutoTokenizer.from_pretrained(model)


def _eval(args: argparse.Namespace) -> None:
    _require("lm_eval", "eval")
    from cap_hf.corpora import find_data_dir
    from cap_hf.evaluation.run import check_request, evaluate, facts_of, settings_of
    from cap_hf.evaluation.tables import main_table, rows_of, write_report
    from cap_hf.evaluation.tasks import check_data

    tasks = args.tasks.split(",")
    settings = settings_of(["expert", "device"] if args.pruning == "both" else [args.pruning], _numbers(args.thresholds, "--thresholds"))
    limits, out = _limits(args.limit, tasks), Path(args.output_dir or f"build/eval/{Path(args.model).name}")
    check_request(tasks, args.run_generated_code, limits, args.batch_size, out)
    data_dir, config = find_data_dir(args.data_dir), _config(args)
    check_data(tasks, data_dir, out)
    model, tokenizer = _load(args.model, config)
    options = {"limits": limits, "batch_size": args.batch_size, "model_name": args.model}
    options |= {"divergence": not args.no_divergence, "references": not args.no_references}
    records = evaluate(
        model, tokenizer, tasks, settings, out, data_dir=data_dir, allow_code=args.run_generated_code, progress=not args.json, **options
    )
    if model.group.rank == 0:
        facts = facts_of(model, records, **options)
        written = [str(path) for path in write_report(records, facts, out)]
        if args.json:
            print(json.dumps({"rows": rows_of(records), "provenance": facts, "written": written}))
        else:
            print(f"{main_table(rows_of(records))}\nwritten to {', '.join(written)}")


def _threshold(args: argparse.Namespace) -> None:
    _require("scipy", "eval")
    from cap_hf.corpora import load_texts
    from cap_hf.evaluation.threshold import check_choice, choose_threshold

    budget = _share(args.budget, "--budget")
    check_choice(budget, args.measure, args.pruning, args.confidence, args.resolution, args.num_tokens, args.batch_size)
    texts = _read_texts(args.text_file) if args.text_file else load_texts(args.corpus, "test", args.data_dir)
    model, tokenizer = _load(args.model, _config(args))
    options = (args.measure, args.pruning, args.confidence, args.resolution, args.num_tokens, args.batch_size)
    choice = choose_threshold(model, tokenizer, texts, budget, *options, progress=not args.json)
    if model.group.rank == 0:
        if args.json:
            print(json.dumps({**asdict(choice), "saved": choice.saved}))
            return
        rows = [
            {
                "p": f"{step.threshold:g}",
                args.measure: f"{step.cost:+.3%}",
                f"at {100 * args.confidence:g}% confidence below": f"{step.upper_bound:+.3%}",
                "devices/token": f"{step.devices_per_token:.3f}",
                "score kept": f"{step.score_kept:.3f}",
            }
            for step in sorted(choice.steps, key=lambda step: step.threshold)
        ]
        print(f"{markdown_table(rows)}\n{choice}")


def _require(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ValueError(f"this command needs the package {package}; install cap_hf[{extra}]")


def _share(text: str, option: str) -> float:
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError as error:
        raise ValueError(f"{option} is {text!r}; it must be a share like 1% or 0.01") from error


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(value) for value in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} is {text!r}; it must be numbers with commas between them, like 0,0.1,0.2") from error


def _limits(text: str | None, tasks: Sequence[str]) -> dict[str, int | None]:
    """``50`` for every task, or ``mmlu=2,gsm8k=50`` for some."""
    if text is None:
        return {}
    try:
        if "=" not in text:
            return dict.fromkeys(tasks, int(text))
        return {name: int(number) for name, number in (each.rsplit("=", 1) for each in text.split(","))}
    except ValueError as error:
        raise ValueError(f"--limit is {text!r}; it must be a number for all tasks, or like mmlu=2,gsm8k=50") from error


def _config(args: argparse.Namespace) -> CAPConfig:
    """The layout that was asked for, by file or by number of ranks; on several processes they are the ranks."""
    rules = {"prune_solver": args.prune_solver, "renormalize": args.renormalize}
    if args.layout:
        if args.num_ranks is not None:
            raise ValueError(f"--num-ranks {args.num_ranks} beside --layout, which says itself how many ranks it is for; leave one out")
        return CAPConfig(layout=ExpertLayout.load(args.layout), **rules)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    num_ranks = args.num_ranks if args.num_ranks is not None else size if size > 1 else 8
    return CAPConfig(layout=_sequential(args.model, Topology(num_ranks)), **rules)


def _read_texts(path: str) -> list[str]:
    """Texts of a UTF-8 file, separated by empty lines."""
    from cap_hf.corpora import read_text

    try:
        return read_text(path).split("\n\n")
    except OSError as error:
        raise ValueError(f"text file {path} cannot be read ({error}); give another file") from error


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
    _add_eval(
        add(
            "eval",
            _eval,
            "accuracy, and what is more sensitive, against the threshold",
            "cap-hf eval --model Qwen/Qwen3-30B-A3B --tasks mmlu,gsm8k,wikitext --thresholds 0,0.2,0.3 --layout layout.json --limit 200",
        )
    )
    _add_threshold(
        add(
            "threshold",
            _threshold,
            "the highest threshold that a budget of accuracy allows",
            "cap-hf threshold --model Qwen/Qwen3-30B-A3B --layout layout.json --budget 1% --corpus wikitext",
        )
    )
    return parser


def _add_pruned_model(parser: argparse.ArgumentParser, rules: Sequence[str]) -> None:
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub name")
    parser.add_argument("--layout", help="layout file; one process plays all of its ranks (default: experts in id order)")
    parser.add_argument("--num-ranks", type=int, help="devices of the layout in id order (default: the processes; 8 for a single one)")
    parser.add_argument("--pruning", default="device", choices=rules, help="pruning rule (default: device)")
    parser.add_argument("--prune-solver", default="greedy", choices=["greedy", "exact"], help="of device pruning (default: greedy)")
    parser.add_argument("--renormalize", action="store_true", help="scale the surviving weights back to their sum")
    parser.add_argument("--data-dir", help="folder of local data (default: CAP_HF_DATA, else the Hub)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per forward (default: 8)")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_pruned_model(parser, ["expert", "device", "both"])
    parser.add_argument("--tasks", required=True, help="with commas: mmlu, gsm8k, humaneval, wikitext, text:<corpus or UTF-8 file>")
    parser.add_argument("--thresholds", default="0,0.1,0.2,0.3,0.4", help="with commas; 0 is always measured (default: 0,0.1,0.2,0.3,0.4)")
    parser.add_argument("--limit", help="documents per task, for mmlu per subject: 50, or mmlu=2,gsm8k=50 (default: all)")
    parser.add_argument("--run-generated-code", action="store_true", help="let humaneval run what the model writes, in a sandbox")
    parser.add_argument(
        "--no-divergence", action="store_true", help="do not compare distributions with p = 0; saves a forward per scored batch"
    )
    parser.add_argument("--no-references", action="store_true", help="do not score reference answers (gsm8k, humaneval)")
    parser.add_argument(
        "--output-dir", help="for records, tables and pictures; a run goes on from its records (default: build/eval/<model>)"
    )


def _add_threshold(parser: argparse.ArgumentParser) -> None:
    _add_pruned_model(parser, ["expert", "device"])
    parser.add_argument("--budget", required=True, help="the most that pruning may cost, like 1%% or 0.01")
    parser.add_argument(
        "--measure",
        default="perplexity",
        choices=["perplexity", "flips"],
        help="rise of perplexity, or other next tokens (default: perplexity)",
    )
    parser.add_argument("--corpus", default="wikitext", help="calibration text by name (default: wikitext)")
    parser.add_argument("--text-file", help="a UTF-8 file of texts separated by empty lines, instead of a corpus")
    parser.add_argument("--num-tokens", type=int, default=16_384, help="of the text, at most (default: 16384)")
    parser.add_argument("--confidence", type=float, default=0.95, help="that the budget holds (default: 0.95)")
    parser.add_argument("--resolution", type=float, default=0.005, help="p is a multiple of it (default: 0.005)")


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
