"""The expert-parallel runtime beside its peers: bytes on the wire, time per MoE layer, and what one rank pays.

    python recipes/bench_runtime.py                       # or: make bench-runtime
    python recipes/bench_runtime.py --parts link --models tiny_qwen3_moe

Peers: Transformers' ``ep_implementation="all_to_all"`` and DeepSpeed AutoEP with its ``comm`` backend, both on the same
model, tokens and ranks, one after the other in every round of one run. Parts:

- ``wire``: four hosts of one rank each; bytes that leave the hosts, per token and MoE layer, headers included.
- ``loopback``: four ranks on one host; time per MoE layer.
- ``link``: two hosts of two ranks each with 200 Mbit/s between them; time per MoE layer, and ladders over the threshold.
- ``one``: a single rank against plain Transformers, the share of pruning in a layer's time, and the time of loading.

Hardware: 2 CPU cores; ``wire`` and ``link`` need Linux and root for network namespaces. About 28 minutes in all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from hosts import INTERFACE, Hosts, reason_against_hosts
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, Placer, RoutingRecorder, Topology
from cap_hf.corpora import find_data_dir, load_texts, token_blocks
from cap_hf.models import embedded_model
from cap_hf.parallel import experts
from cap_hf.parallel.groups import init_expert_group
from cap_hf.parallel.loading import set_expert_parameters
from cap_hf.report import markdown_table

PREFILL, DECODE, CONTEXT = 512, 8, 32  # tokens of a prefill, sequences of a decode step, and their length before it; per rank
WIDE = dict(
    vocab_size=512, hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=64,
    num_experts_per_tok=8, moe_intermediate_size=256, intermediate_size=256, norm_topk_prob=True,
)  # fmt: skip
THRESHOLDS, RULES = (0.1, 0.2, 0.3, 0.4), ("expert", "device")
PAIR_BYTES = 6  # of an expert id and its weight
INTER_NODE_COST = 8.0  # of a row that leaves its host, against one that stays: what this benchmark tells placement and pruning


@dataclass
class BenchArguments:
    """Options of the benchmark."""

    parts: str = field(default="wire,loopback,link,one", metadata={"help": "comma-separated parts"})
    models: str = field(default="tiny_qwen3_moe,wide", metadata={"help": "tiny_qwen3_moe, tiny_deepseek_v2, wide (synthetic)"})
    rate: str = field(default="200mbit", metadata={"help": "of the link between the hosts, for the part 'link'"})
    rounds: int = field(default=7, metadata={"help": "forwards of every system, taken in turns"})
    output_dir: str = field(default="build/bench_runtime", metadata={"help": "where results.json and the pictures of the ladders go"})
    measure: str = field(default="", metadata={"help": "internal: the part that this rank measures"})
    ranks_per_node: int = field(default=4, metadata={"help": "internal"})


# ---- the systems ----


def full_model(name: str) -> Any:
    """A complete plain model with Transformers' grouped kernel."""
    if name != "wide":
        return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=torch.float32, experts_implementation="grouped_mm").eval()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **WIDE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="grouped_mm").eval()


def transformers_all_to_all(name: str, rank: int, size: int) -> Any:
    """The class behind ``ep_implementation="all_to_all"`` on every experts module, which holds this rank's contiguous experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    model = full_model(name)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    for module in experts_modules(model):
        each = module.num_experts // size
        cut = {key: value.detach()[rank * each : (rank + 1) * each].clone() for key, value in module.named_parameters()}
        set_expert_parameters(module, cut)
        module._is_expert_parallel = True
        module.forward = AllToAllEP(module, mesh["ep"], mesh["tp"])
    return model


def deepspeed_autoep(name: str, rank: int, size: int) -> Any:
    """AutoEP's layers with the ``comm`` backend, put in place as its engine does."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    class Replacing(AutoEP):
        def _retarget_transformers_output_recorders(self, *_: Any) -> None:
            """Recording router logits, which fails with Transformers 5.24 and is not needed here."""

    model = full_model(name)
    autoep = Replacing(model, AutoEPConfig(enabled=True, autoep_size=size, comm_backend="comm"))
    autoep.replace_moe_layers(autoep.ep_parser(), size, rank)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "set_deepspeed_parallelism"):
            layer.mlp.set_deepspeed_parallelism()
    return model.eval()


def experts_modules(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]


# ---- measuring, on every rank ----


class LayerClock:
    """Seconds that a model spends in its MoE blocks."""

    def __init__(self, model: Any) -> None:
        self.seconds, self._start = 0.0, 0.0
        inner = model.model if isinstance(model, CAPMoEModel) else model
        self.num_layers = 0
        for layer in inner.model.layers:
            if hasattr(layer.mlp, "experts"):
                self.num_layers += 1
                layer.mlp.register_forward_pre_hook(self._begin)
                layer.mlp.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start

    def per_layer(self) -> float:
        """Seconds per MoE layer since the last call."""
        seconds, self.seconds = self.seconds / self.num_layers, 0.0
        return seconds


@dataclass
class System:
    """One way to run the model; ``prepare`` puts it into place before each of its turns."""

    name: str
    model: Any
    clock: LayerClock
    prepare: Callable[[], None] = lambda: None


class LeastBytes:
    """Watches forwards and counts what they have to send: a row to every distinct remote rank of a token, one back, and per
    pair that leaves an id and a weight. Without headers of any kind.
    """

    def __init__(self, model: CAPMoEModel) -> None:
        self._model, self.bytes = model, 0
        self._row_bytes = int(model.config.hidden_size) * (2 if model.cap_config.wire_dtype else 4)

    def begin_forward(self, *_: Any) -> None:
        """Nothing to prepare."""

    def end_forward(self, _: Any) -> None:
        """Nothing to close."""

    def observe(self, layer: int, expert_ids: torch.Tensor, _: torch.Tensor) -> None:
        """Add one layer's decisions, (T, K) ids with -1 for pruned."""
        rank_of = self._model.layout.expert_to_rank[layer]
        for ids in expert_ids.tolist():
            remote = [int(rank_of[expert]) for expert in ids if expert >= 0 and rank_of[expert] != self._model.group.rank]
            self.bytes += 2 * self._row_bytes * len(set(remote)) + PAIR_BYTES * len(remote)


def own_bytes(model: Any, arguments: dict[str, Any]) -> tuple[int, int]:
    """What one forward of ours has to send for this rank's tokens, and what this rank gave to the collectives; 0 for a peer."""
    if not isinstance(model, CAPMoEModel):
        model(**arguments)
        return 0, 0
    model.traffic.reset()
    model.attach(watching := LeastBytes(model))
    model(**arguments)
    model.detach(watching)
    return watching.bytes, model.traffic.bytes_sent


def bytes_on_wire() -> int:
    """Bytes this host has sent, told by the first of its ranks; 0 for the others, and where it is no host of its own."""
    if int(os.environ["LOCAL_RANK"]) > 0:
        return 0
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{INTERFACE}:"):
            return int(line.split(":")[1].split()[8])
    return 0


def tokens_of(name: str, rank: int, size: int, count: int, seed: int = 0) -> torch.Tensor:
    """This rank's token ids, (count,): held-out text for embedded models, random ones for the synthetic one."""
    if name == "wide":
        return torch.randint(0, WIDE["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed * size + rank))
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(name))
    corpus = "wikitext" if find_data_dir(None) else "python"
    split = "test" if seed == 0 else "train"
    return torch.from_numpy(token_blocks(tokenizer, load_texts(corpus, split), count, size)[rank])


def workloads(name: str, rank: int, size: int) -> Iterator[tuple[str, Callable[[Any], dict[str, Any]]]]:
    """Name, and the arguments of one measured forward of a model."""
    prefill = tokens_of(name, rank, size, PREFILL)[None]
    yield f"prefill, {PREFILL} tokens per rank", lambda model: {"input_ids": prefill, "use_cache": False, "logits_to_keep": 1}
    context = tokens_of(name, rank, size, DECODE * (CONTEXT + 1)).view(DECODE, CONTEXT + 1)

    def step(model: Any) -> dict[str, Any]:
        cache = DynamicCache(config=model.config)
        model(input_ids=context[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        return {"input_ids": context[:, -1:], "cache": cache, "use_cache": True}

    yield f"decode, {DECODE} sequences per rank", step


def measured(systems: list[System], make: Callable[[Any], dict[str, Any]], rounds: int, what: str) -> list[dict[str, Any]]:
    """Every system in turns: median over rounds of the slowest rank's seconds per layer, and bytes of all hosts in one forward."""
    group = init_expert_group()
    seconds = np.zeros((rounds, len(systems)))
    sent, least, payload = np.zeros((3, len(systems)))
    with torch.no_grad():
        for turn in tqdm(range(-1, rounds), desc=what, unit="round", disable=group.rank > 0):  # the first to warm up
            for index, system in enumerate(systems):
                system.prepare()
                if turn < 0:
                    least[index], payload[index] = own_bytes(system.model, make(system.model))
                    continue
                arguments = make(system.model)
                system.clock.per_layer()
                group.all_gather(torch.zeros(1))
                before = bytes_on_wire()
                system.model(**arguments)
                took = system.clock.per_layer()
                group.all_gather(torch.zeros(1))
                after = bytes_on_wire()
                seconds[turn, index] = took
                sent[index] = after - before
    slowest = group.all_gather(torch.from_numpy(seconds)).amax(dim=0)
    all_sent, all_least, all_payload = group.all_gather(torch.from_numpy(np.stack([sent, least, payload]))).sum(dim=0)
    return [
        {
            "system": system.name,
            "seconds": float(slowest[:, index].median()),
            "bytes": float(all_sent[index]),
            "least_bytes": float(all_least[index]),
            "payload_bytes": float(all_payload[index]),
        }
        for index, system in enumerate(systems)
    ]


def our_systems(name: str, part: str, topology: Topology) -> list[System]:
    """Our runtime under Default and the learned layout, and at several thresholds; one model plays all of them."""
    group = init_expert_group()
    model = CAPMoEModel(full_model(name), CAPConfig())
    learning = tokens_of(name, group.rank, group.size, 2048, seed=1).view(4, 512)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        for row in learning:
            model(input_ids=row[None], use_cache=False, logits_to_keep=1)
    trace = recorder.trace()
    learned = ExpertLayout.from_dict(group.from_first(lambda: Placer(topology, seed=0).place(trace).to_dict()))
    default = ExpertLayout.sequential(trace.num_layers, trace.num_experts, topology, trace.layer_ids)
    clock = LayerClock(model)

    def system(words: str, layout: ExpertLayout, pruning: str = "none", threshold: float = 0.0, **options: Any) -> System:
        def prepare() -> None:
            if model.layout.fingerprint != layout.fingerprint:
                model.apply_layout(layout)
            model.set_pruning(pruning, threshold, **({"dispatch": "auto", "wire_dtype": None} | options))

        return System(f"ours, {words}", model, clock, prepare)

    systems = [
        system("Default, p = 0", default),
        system("learned layout, p = 0", learned),
        system("learned layout, p = 0.3", learned, "device", 0.3),
        system("learned layout, p = 0.3, bf16 rows", learned, "device", 0.3, wire_dtype="bfloat16"),
    ]
    if topology.num_nodes > 1:  # the baseline of our own gains first: device-centric, without nodes
        systems.insert(0, system("Default, p = 0, flat", default, dispatch="flat"))
        systems.append(system("learned layout, p = 0, flat", learned, dispatch="flat"))
    if part == "link":
        systems += [system(f"{rule} pruning, p = {p}", learned, rule, p) for rule in RULES for p in THRESHOLDS]
    return systems


def measure(args: BenchArguments) -> None:
    """What every rank does in one launch; rank 0 prints a line of JSON per result."""
    group = init_expert_group()
    topology = Topology(group.size, args.ranks_per_node, INTER_NODE_COST)
    for name in args.models.split(","):
        systems = []
        for words, peer in (("Transformers all_to_all", transformers_all_to_all), ("DeepSpeed AutoEP comm", deepspeed_autoep)):
            model = peer(name, group.rank, group.size)
            systems.append(System(words, model, LayerClock(model)))
        systems += our_systems(name, args.measure, topology)
        for words, make in workloads(name, group.rank, group.size):
            tokens = (PREFILL if words.startswith("prefill") else DECODE) * group.size
            for result in measured(systems, make, args.rounds, f"{args.measure}, {name}, {words}"):
                if group.rank == 0:
                    print(
                        "RESULT",
                        json.dumps({"part": args.measure, "model": name, "workload": words, "tokens": tokens, **result}),
                        flush=True,
                    )


# ---- one rank ----


class KeepClock:
    """Seconds spent in the pruning rule, while it stands in for the runtime's own function."""

    def __init__(self) -> None:
        self.seconds, self.keep = 0.0, experts._keep

    def __call__(self, *given: Any) -> Any:
        start = time.perf_counter()
        kept = self.keep(*given)
        self.seconds += time.perf_counter() - start
        return kept


def measure_one(args: BenchArguments) -> list[dict[str, Any]]:
    """A single process: ours at p = 0 against plain Transformers, what pruning costs in a layer, and how long loading takes."""
    results = []
    for name in args.models.split(","):
        models = {key: full_model(name) for key in ("plain", "plain again")}
        models |= {key: CAPMoEModel(full_model(name)) for key in ("ours", "pruned")}
        pruned = models["pruned"]
        pruned.apply_layout(ExpertLayout.sequential(pruned.layout.num_layers, 64, Topology(8), pruned.layout.layer_ids))
        pruned.set_pruning("device", 0.3)
        clocks = {key: LayerClock(model) for key, model in models.items()}
        for words, make in workloads(name, 0, 1):
            turns = [
                one_turn(models, clocks, make, backwards=turn % 2 == 0)
                for turn in tqdm(range(-2, 5 * args.rounds), desc=f"one, {name}, {words}", unit="round")
            ][2:]  # the first two to warm up
            ratios = {
                "ratio": [turn["ours"] / turn["plain"] for turn in turns],
                "noise": [turn["plain again"] / turn["plain"] for turn in turns],
                "pruning_share": [turn["keep"] / turn["pruned"] for turn in turns],
                "plain_s": [turn["plain"] for turn in turns],
            }
            results.append(
                {"part": "one", "model": name, "workload": words} | {key: float(np.median(each)) for key, each in ratios.items()}
            )
        results.append(measure_loading(models["plain"], name, args.rounds))
    return results


@torch.no_grad()
def one_turn(
    models: dict[str, Any], clocks: dict[str, LayerClock], make: Callable[[Any], dict[str, Any]], backwards: bool
) -> dict[str, float]:
    """Seconds per layer of one forward of each model, in one order or the other; ``keep`` is the pruning rule's part of it."""
    took = {}
    for key in list(models)[:: -1 if backwards else 1]:
        arguments, keep = make(models[key]), KeepClock()
        clocks[key].per_layer()
        with mock.patch.object(experts, "_keep", keep):
            models[key](**arguments)
        took[key] = clocks[key].per_layer()
        if key == "pruned":
            took["keep"] = keep.seconds / clocks[key].num_layers
    return took


def measure_loading(model: Any, name: str, rounds: int) -> dict[str, Any]:
    """``from_pretrained`` of the whole model, ours against plain Transformers, from files that are in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        seconds: dict[str, list[float]] = {"ours": [], "plain": []}
        for turn in tqdm(range(rounds + 1), desc=f"one, {name}, loading", unit="round"):
            for key, kind in (("plain", AutoModelForCausalLM), ("ours", CAPMoEModel))[:: 1 if turn % 2 else -1]:
                start = time.perf_counter()
                kind.from_pretrained(folder, dtype=torch.float32)
                seconds[key].append(time.perf_counter() - start)
    ratios = [ours / plain for ours, plain in zip(seconds["ours"][1:], seconds["plain"][1:], strict=True)]
    plain_s = float(np.median(seconds["plain"][1:]))
    return {"part": "one", "model": name, "workload": "from_pretrained", "ratio": float(np.median(ratios)), "plain_s": plain_s}


# ---- launching and reporting ----


def launched(args: BenchArguments, part: str) -> list[dict[str, Any]]:
    """Results of one part, measured by four ranks."""
    script = [__file__, "--measure", part, "--models", args.models, "--rounds", str(args.rounds)]
    if part == "loopback":
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--use_deepspeed",
            "--zero_stage",
            "0",
            "--num_processes",
            "4",
            *script,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the ranks failed:\n{done.stderr[-3000:]}")
        output = done.stdout
    else:
        per_host, rate = (1, None) if part == "wire" else (2, args.rate)
        with Hosts(4 // per_host, rate) as hosts:
            output = hosts.launch(per_host, [*script, "--ranks_per_node", str(per_host if part == "link" else 4)], timeout_s=1800)
    return [json.loads(line.split("RESULT ", 1)[1]) for line in output.splitlines() if "RESULT " in line]


def report(part: str, results: list[dict[str, Any]]) -> str:
    """Tables of one part."""
    if part == "one":
        rows = [
            {
                "model": each["model"],
                "workload": each["workload"],
                "ours / plain grouped_mm": f"{each['ratio']:.3f}",
                "plain / plain": f"{each['noise']:.3f}",
                "pruning, share of a layer": f"{each['pruning_share']:.1%}",
                "plain, ms per layer": f"{1e3 * each['plain_s']:.2f}",
            }
            for each in results
            if "noise" in each
        ]
        loading = [
            {"model": each["model"], "ours / plain": f"{each['ratio']:.2f}", "plain, s": f"{each['plain_s']:.2f}"}
            for each in results
            if "noise" not in each
        ]
        return f"## one rank\n\n{markdown_table(rows)}\n\n## from_pretrained on one rank\n\n{markdown_table(loading)}"
    sections = []
    for model, workload in dict.fromkeys((each["model"], each["workload"]) for each in results):
        chosen = [each for each in results if (each["model"], each["workload"]) == (model, workload)]
        best_bytes, best_s = (min(each[key] for each in chosen[:2]) for key in ("bytes", "seconds"))
        ours_s = chosen[2]["seconds"]
        rows = []
        for each in chosen:
            row = {"system": each["system"], "ms per MoE layer": f"{1e3 * each['seconds']:.2f}"}
            row |= {"peer / this": f"{best_s / each['seconds']:.2f}", "our flat Default / this": f"{ours_s / each['seconds']:.2f}"}
            if each["bytes"]:
                row |= {"bytes / token": f"{each['bytes'] / each['tokens']:,.0f}", "of the peer's": f"{each['bytes'] / best_bytes:.3f}"}
                if part == "wire":  # elsewhere some rows stay on the host
                    row |= {
                        words: f"{each[key] / each['least_bytes']:.3f}" if each["least_bytes"] else ""
                        for words, key in (("of rows, ids, weights", "bytes"), ("without headers", "payload_bytes"))
                    }
            rows.append(row)
        sections.append(f"## {part}: {model}, {workload}\n\n{markdown_table(rows)}")
    return "\n\n".join(sections)


def draw_ladders(results: list[dict[str, Any]], out: Path) -> None:
    """Pictures of the time per layer against the threshold, one per model and workload."""
    from cap_hf.plots import plot_lines

    for model, workload in dict.fromkeys((each["model"], each["workload"]) for each in results):
        ms = {each["system"]: 1e3 * each["seconds"] for each in results if (each["model"], each["workload"]) == (model, workload)}
        unpruned = (0.0, ms["ours, learned layout, p = 0"])
        series = {f"{rule} pruning": [unpruned, *((p, ms[f"ours, {rule} pruning, p = {p}"]) for p in THRESHOLDS)] for rule in RULES}
        plot_lines(series, out / f"ladder_{model}_{workload.split(',')[0]}.png", "threshold p", "ms per MoE layer")


def main() -> None:
    (args,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    if args.measure:
        measure(args)
        return
    out = Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    everything = []
    for part in args.parts.split(","):
        if part in ("wire", "link") and (reason := reason_against_hosts()):
            print(f"part {part} skipped: {reason}")
            continue
        print(f"\nmeasuring part {part} ...", flush=True)
        results = measure_one(args) if part == "one" else launched(args, part)
        everything += results
        print(f"\n{report(part, results)}", flush=True)
        if part == "link":
            draw_ladders(results, out)
        (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(f"\nwritten to {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}")


if __name__ == "__main__":
    main()
