"""Train the two embedded models from real text: a small Qwen3-MoE and a small DeepSeek-V2.

    python recipes/train_tiny.py --family qwen3_moe --output_dir build/tiny_qwen3_moe --data_dir ../shared/data

Hardware: one CPU core, about an hour for the default number of steps. Expect a WikiText-2 test perplexity
(4,096-entry BPE, 512-token windows) of about 83; the exact figures of the shipped weights are in their model cards.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cap_hf.corpora import load_texts, token_blocks

VOCAB_SIZE, BLOCK = 4096, 512  # BPE entries; tokens per training sequence = longest context of the shipped models
EPOCHS = {"wikitext": 8, "arxiv": 1, "gsm8k": 1, "python": 1}  # passes over each corpus in one mixture epoch
PYTHON_CHARACTERS = 4_000_000  # of the 10 million of standard-library source, so that code does not dominate
EVALUATED = ("wikitext", "gsm8k", "arxiv", "python", "humaneval", "chat")

SHARED: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=192, num_attention_heads=6, moe_intermediate_size=48, max_position_embeddings=BLOCK,
    tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=1,
)  # fmt: skip
FAMILIES = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHARED, num_hidden_layers=4, num_key_value_heads=3, head_dim=32, intermediate_size=384, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=True, router_aux_loss_coef=0.0,
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **SHARED, num_hidden_layers=5, num_key_value_heads=6, first_k_dense_replace=1, intermediate_size=384, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, norm_topk_prob=False, routed_scaling_factor=1.0, topk_method="greedy",
        q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    ),
}  # fmt: skip


@dataclass
class RecipeArguments:
    """What this recipe adds to ``TrainingArguments``."""

    family: str = field(default="qwen3_moe", metadata={"help": f"one of {', '.join(FAMILIES)}"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local corpora; without it they come from the Hub by name"})
    balance_coef: float = field(default=0.01, metadata={"help": "weight of the per-layer load-balancing loss"})
    shipped_dtype: str = field(default="bfloat16", metadata={"help": "dtype of the saved safetensors file"})


class BalancedTrainer(Trainer):
    """Adds the load-balancing loss layer by layer; Transformers' own sums the layers first and so balances none of them."""

    balance_coef = 0.01

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs, output_router_logits=True, use_cache=False)
        experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
        balance = sum(load_balancing_loss_func((logits,), experts, top_k) for logits in outputs.router_logits) / len(outputs.router_logits)
        loss = outputs.loss + (self.balance_coef * balance if model.training else 0.0)
        return (loss, {"loss": outputs.loss, "logits": outputs.logits}) if return_outputs else loss


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with an end-of-text and a padding token, trained on ``texts``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>", "<|pad|>"], initial_alphabet=alphabet)
    )
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, pad_token="<|pad|>", model_max_length=BLOCK)


def pack(tokenizer: Any, texts: list[str], rng: np.random.Generator | None = None) -> Dataset:
    """Documents, shuffled when ``rng`` is given, joined by end-of-text and cut into (blocks, BLOCK) rows."""
    order = rng.permutation(len(texts)) if rng is not None else range(len(texts))
    blocks = token_blocks(tokenizer, [texts[i] for i in order], BLOCK)
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def training_texts(data_dir: str | None, rng: np.random.Generator) -> dict[str, list[str]]:
    """Training part of every corpus; of the large Python one a random choice of files."""
    texts = {name: load_texts(name, "train", data_dir) for name in EPOCHS}
    shuffled = [texts["python"][i] for i in rng.permutation(len(texts["python"]))]
    ends = np.cumsum([len(text) for text in shuffled])
    texts["python"] = [text for text, end in zip(shuffled, ends, strict=True) if end <= PYTHON_CHARACTERS]
    return texts


def ship(model: Any, tokenizer: Any, dtype: str, out: Path) -> None:
    """Save weights in ``dtype`` and a config that computes in float32, with the cache that training turns off."""
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text()) | {"dtype": "float32", "use_cache": True}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def model_card(summary: dict[str, Any], command: str) -> str:
    """README of a shipped model: what it is, what it was trained on, what it reaches."""
    corpora = ", ".join(f"{name} x {passes}" for name, passes in summary["corpora"].items())
    scores = "\n".join(f"| {name} | {value:.1f} |" for name, value in summary["perplexity"].items())
    return f"""# {Path(summary["output_dir"]).name}

A {summary["family"]} with {summary["parameters"] / 1e6:.1f} million parameters, for tests and demonstrations: too small to be
useful as a language model, but trained on real text, so that its routing and the effect of pruning mean something.

- Trained on {summary["tokens"] / 1e6:.1f} million tokens in {summary["steps"]:,} steps: {summary["minutes"]:.0f} minutes on a CPU core.
- Mixture of {summary["mixture_tokens"] / 1e6:.1f} million tokens, corpus x passes: {corpora}. wikitext is the validation part
  of WikiText-2, python the source of Python's standard library, arxiv abstracts. Every 20th document of arxiv and python is held out.
- Tokenizer: byte-level BPE of {VOCAB_SIZE:,} entries trained on the same text. Context: {BLOCK} tokens.
- Weights are stored in {summary["shipped_dtype"]} and scored so.
- Made by `{command}`

| held-out text | perplexity per token |
|---|---:|
{scores}

humaneval and chat were not trained on. The texts keep their own licences (WikiText CC BY-SA, GSM8K MIT, arXiv metadata CC0, Python PSF).
"""


def main() -> None:
    defaults = dict(
        learning_rate=3e-3, per_device_train_batch_size=4, per_device_eval_batch_size=8, max_steps=4000, warmup_steps=150,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs='{"min_lr_rate": 0.02}', weight_decay=0.1, adam_beta2=0.95,
        max_grad_norm=1.0, logging_steps=50, save_steps=500, save_total_limit=1, report_to="none",
        use_cpu=not torch.cuda.is_available(), dataloader_num_workers=0, seed=0, optim="adamw_torch",
    )  # fmt: skip
    parser = HfArgumentParser((RecipeArguments, TrainingArguments))
    parser.set_defaults(**defaults)
    recipe, args = parser.parse_args_into_dataclasses()
    if recipe.family not in FAMILIES:
        raise ValueError(f"--family {recipe.family!r} is not known; choose one of {', '.join(FAMILIES)}")
    set_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    texts = training_texts(recipe.data_dir, rng)
    tokenizer = build_tokenizer([text for name in EPOCHS for text in texts[name]])
    parts = [pack(tokenizer, texts[name], rng) for name, passes in EPOCHS.items() for _ in range(passes)]
    mixture = concatenate_datasets(parts).shuffle(seed=args.seed)
    held_out = {name: pack(tokenizer, load_texts(name, "test", recipe.data_dir)) for name in EVALUATED}

    config = FAMILIES[recipe.family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm")
    trainer = BalancedTrainer(model, args, train_dataset=mixture, processing_class=tokenizer)
    trainer.balance_coef = recipe.balance_coef
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    minutes = (time.perf_counter() - started) / 60
    model.to(getattr(torch, recipe.shipped_dtype)).to(torch.float32)  # score the weights as they will be stored
    perplexity = {name: round(math.exp(trainer.evaluate(part)["eval_loss"]), 2) for name, part in held_out.items()}
    out = Path(args.output_dir)
    ship(model, tokenizer, recipe.shipped_dtype, out)
    summary: dict[str, Any] = dict(
        family=recipe.family, parameters=sum(p.numel() for p in model.parameters()), steps=args.max_steps,
        tokens=args.max_steps * args.per_device_train_batch_size * BLOCK, mixture_tokens=len(mixture) * BLOCK, corpora=EPOCHS,
        minutes=round(minutes, 1), shipped_dtype=recipe.shipped_dtype, output_dir=str(args.output_dir), perplexity=perplexity,
    )  # fmt: skip
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n")
    command = (
        f"python recipes/train_tiny.py --family {recipe.family} --max_steps {args.max_steps} --output_dir {args.output_dir} --data_dir ..."
    )
    (out / "README.md").write_text(model_card(summary, command))
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
