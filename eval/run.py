"""Accuracy and more sensitive measures against the pruning threshold, on one process or on many ranks.

    python eval/run.py --model cap_hf/models/tiny_qwen3_moe --tasks wikitext,gsm8k --limit 8        # or: make eval
    accelerate launch --use_deepspeed --num_processes 8 --zero_stage 0 eval/run.py --model Qwen/Qwen3-30B-A3B \\
        --layout layout.json --tasks mmlu,gsm8k,humaneval,wikitext --run-generated-code --pruning both

The options are those of ``cap-hf eval``. One process plays all ranks of the layout; several are its ranks and share the
requests. Hardware: 1 CPU core and some minutes for an embedded model; for others as many devices as hold them, and hours.
Expect tables, a CSV and pictures in the output folder, and device pruning to lose no more nats per token than expert
pruning at equal p.
"""

from __future__ import annotations

import sys

from cap_hf.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
