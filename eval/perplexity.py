"""Perplexity of an embedded model against the pruning threshold p, expert pruning beside device pruning.

    python eval/perplexity.py --model tiny_qwen3_moe --num_ranks 8        # or: make eval

One process plays all ranks: pruning acts as on that many devices, nothing is sent. Hardware: 1 CPU core, about a minute
and a half per model. Expect device pruning to lose less perplexity than expert pruning at equal p.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPConfig, CAPMoEModel, Placer, RoutingRecorder, Topology
from cap_hf.corpora import find_data_dir, load_texts, token_blocks
from cap_hf.metrics import remote_rows_per_token
from cap_hf.models import embedded_model
from cap_hf.recorder import record_texts
from cap_hf.report import markdown_table, provenance


@dataclass
class EvalArguments:
    """Options of the evaluation."""

    model: str = field(default="tiny_qwen3_moe", metadata={"help": "tiny_qwen3_moe or tiny_deepseek_v2"})
    num_ranks: int = field(default=8, metadata={"help": "devices that pruning assumes"})
    method: str = field(default="greedy", metadata={"help": "placement method"})
    thresholds: str = field(default="0,0.1,0.2,0.3,0.4", metadata={"help": "comma-separated values of p"})
    corpus: str | None = field(
        default=None, metadata={"help": "corpus to score; default wikitext, or python where there is no data folder"}
    )
    renormalize: bool = field(default=False, metadata={"help": "scale surviving weights back to the token's own sum"})
    blocks: int = field(default=128, metadata={"help": "512-token blocks to score"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local corpora"})
    output_dir: str = field(default="build/eval", metadata={"help": "where perplexity.json goes"})


def score(model: CAPMoEModel, blocks: np.ndarray, label: str) -> dict[str, float]:
    """Perplexity, rows sent per token and layer, and experts kept, over ``blocks`` (n, S)."""
    losses: list[float] = []
    num_ranks, batch = model.layout.num_ranks, 8
    with RoutingRecorder(model) as recorder, torch.no_grad():
        for start in tqdm(range(0, len(blocks), batch), desc=label, leave=False):
            ids = torch.from_numpy(blocks[start : start + batch])
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            losses += torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").tolist()
    trace = recorder.trace()
    source = trace.token_to_request % batch % num_ranks  # as the model numbers its batch rows
    rows = remote_rows_per_token(trace.expert_ids, model.layout.expert_to_rank, num_ranks, source).mean()
    kept = (trace.expert_ids >= 0).sum(axis=2).mean()
    return {"perplexity": math.exp(sum(losses) / len(losses)), "rows_per_token": float(rows), "experts_kept": float(kept)}


def main() -> None:
    (args,) = HfArgumentParser(EvalArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    thresholds = [float(value) for value in args.thresholds.split(",")]
    for threshold in thresholds:
        CAPConfig(pruning="device", prune_threshold=threshold)  # refuses a bad value before anything is loaded
    corpus = args.corpus or ("wikitext" if find_data_dir(args.data_dir) else "python")
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(args.model))
    blocks = token_blocks(tokenizer, load_texts(corpus, "test", args.data_dir), 512, args.blocks)
    plain = CAPMoEModel.from_pretrained(embedded_model(args.model), dtype=torch.float32)
    trace = record_texts(plain, tokenizer, load_texts(corpus, "train", args.data_dir))
    plain.apply_layout(Placer(Topology(args.num_ranks), method=args.method).place(trace))
    results, rows = [], []
    for threshold in thresholds:
        for rule in ("expert", "device") if threshold else ("none",):
            plain.set_pruning(rule, threshold, renormalize=args.renormalize)
            result = score(plain, blocks, f"{rule}, p = {threshold}")
            results.append({"pruning": rule, "threshold": threshold, **result})
            change = result["perplexity"] / results[0]["perplexity"] - 1
            numbers = {"p": f"{threshold:g}", "perplexity": f"{result['perplexity']:.2f}", "change": f"{change:+.2%}"}
            rows.append(
                {
                    "pruning": rule,
                    **numbers,
                    "rows sent/token": f"{result['rows_per_token']:.2f}",
                    "experts kept": f"{result['experts_kept']:.2f}",
                }
            )
    print(f"\n{args.model}, {blocks.size:,} tokens of {corpus}, {args.num_ranks} ranks, {args.method} placement\n")
    print(markdown_table(rows))
    out = Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "arguments": vars(args),
        "corpus": corpus,
        "tokens": int(blocks.size),
        "results": results,
        "layout": plain.layout.to_dict(),
        **provenance(),
    }
    (out / f"perplexity_{args.model}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {out / f'perplexity_{args.model}.json'}")


if __name__ == "__main__":
    main()
