"""What every rank runs in ``test_hosts``: flat and hierarchical dispatch against plain Transformers, and bytes that leave the host."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, Topology
from cap_hf.models import embedded_model

TOKENS = 128  # 96 KB of hidden states per rank: long enough for "auto" to go through the nodes


def sent() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def main() -> None:
    name = embedded_model("tiny_qwen3_moe")
    layout = ExpertLayout.sequential(4, 64, Topology(4, 2, 8.0))
    model = CAPMoEModel.from_pretrained(name, cap_config=CAPConfig(layout=layout, timeout_s=60), dtype=torch.float32)
    group = model.group
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(group.rank))
    plain = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, experts_implementation="grouped_mm").eval()
    result = {"local_ranks": int(os.environ["LOCAL_WORLD_SIZE"])}
    with torch.no_grad():
        want = plain(input_ids=ids).logits
        for dispatch in ("flat", "auto"):
            model.set_pruning("none", dispatch=dispatch)
            group.all_gather(torch.zeros(1))
            before, start = sent(), time.perf_counter()
            got = model(input_ids=ids).logits
            seconds = time.perf_counter() - start
            group.all_gather(torch.zeros(1))
            worst = ((got - want).abs() / (1 + want.abs())).max()
            all_worst, all_seconds = group.all_gather(torch.tensor([float(worst), seconds])).amax(dim=0).tolist()
            result[dispatch] = {"bytes": sent() - before, "seconds": all_seconds, "difference": all_worst}
    if len(sys.argv) > 1 and group.rank == int(sys.argv[1]):
        raise ValueError("this rank was asked to fail")
    if group.rank == 0:
        print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
