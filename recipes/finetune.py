"""Fine-tune a model under device pruning, so that it loses less by it, and say what that won.

    python recipes/finetune.py --output_dir build/finetune
    python recipes/finetune.py recipes/finetune.yaml                  # options from a file, this one with the locality term

The trainer traces the model, places its experts and trains it with the pruning rule in the forward pass, against the text
and against what the model said before, unpruned. Hardware: one process; the embedded model (the default) needs 2 CPU cores,
about 5 minutes of training and 2 of evaluation. Expect it to win back most of the perplexity that p = 0.3 costs.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch
from transformers import AutoTokenizer, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPMoEModel, CAPTrainer, CAPTrainingArguments
from cap_hf.corpora import load_texts
from cap_hf.models import embedded_model
from cap_hf.report import markdown_table, provenance


@dataclass
class RecipeArguments:
    """What this recipe adds to ``CAPTrainingArguments``."""

    model: str = field(default=str(embedded_model()), metadata={"help": "checkpoint folder or Hub name"})
    corpora: str = field(default="wikitext=8,arxiv=1,gsm8k=1,python=1", metadata={"help": "training texts, and how often each is taken"})
    max_documents: int = field(default=8000, metadata={"help": "of each corpus for training"})
    eval_documents: int = field(default=60, metadata={"help": "of each corpus's held-out part"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local corpora; without it they come from the Hub by name"})


DEFAULTS = dict(
    output_dir="build/finetune", per_device_train_batch_size=4, per_device_eval_batch_size=8, max_steps=300, learning_rate=3e-4,
    warmup_steps=10, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs='{"min_lr_rate": 0.05}', adam_beta2=0.95,
    distillation_weight=0.5, eval_thresholds="0,0.3", logging_steps=20, save_strategy="no", report_to="none", seed=0,
    use_cpu=not torch.cuda.is_available(),
)  # fmt: skip


def text_dataset(names: dict[str, int], split: str, limit: int, data_dir: str | None, seed: int) -> datasets.Dataset:
    """Documents of several corpora, shuffled."""
    texts = [text for name, times in names.items() for text in load_texts(name, split, data_dir)[:limit] * times]
    return datasets.Dataset.from_dict({"text": texts}).shuffle(seed=seed)


def main() -> None:
    parser = HfArgumentParser((RecipeArguments, CAPTrainingArguments))
    parser.set_defaults(**DEFAULTS)
    if len(sys.argv) == 2 and sys.argv[1].endswith((".yaml", ".yml")):
        recipe, args = parser.parse_yaml_file(sys.argv[1])
    else:
        recipe, args = parser.parse_args_into_dataclasses()
    logging.disable_progress_bar()
    names = {name: int(times) for name, times in (each.split("=") for each in recipe.corpora.split(","))}
    model = CAPMoEModel.from_pretrained(recipe.model, dtype=torch.float32)
    train = text_dataset(names, "train", recipe.max_documents, recipe.data_dir, args.seed)
    held_out = text_dataset(dict.fromkeys(names, 1), "test", recipe.eval_documents, recipe.data_dir, args.seed)
    trainer = CAPTrainer(model, args, train, held_out, processing_class=AutoTokenizer.from_pretrained(recipe.model))
    trainer.optimize()
    before = trainer.evaluate()
    took = trainer.train().metrics["train_runtime"]
    after = trainer.evaluate()
    trainer.save_model()
    rows = []
    for threshold in args.thresholds:
        row = {"p": f"{threshold:g}"}
        for words, metrics in (("before", before), ("after", after)):
            row[f"perplexity {words}"] = f"{metrics[f'eval_perplexity_p{threshold:g}']:.2f}"
            row[f"devices/token {words}"] = f"{metrics[f'eval_devices_per_token_p{threshold:g}']:.3f}"
        rows.append(row)
    print(f"\n{markdown_table(rows)}\n\n{took / 60:.1f} minutes of training")
    name = f"eval_loss_p{args.prune_threshold:g}"
    if before.get("eval_loss_p0", math.inf) < before[name]:
        lost, left = before[name] - before["eval_loss_p0"], after[name] - before["eval_loss_p0"]
        change = math.expm1(after["eval_loss_p0"] - before["eval_loss_p0"])
        print(f"won back {1 - left / lost:.0%} of what p = {args.prune_threshold:g} costs; unpruned perplexity {change:+.2%}")
    report = {"before": before, "after": after, "minutes": took / 60, **provenance()}
    (Path(args.output_dir) / "finetune.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
