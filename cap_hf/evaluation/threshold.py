"""The highest threshold p that a budget of accuracy allows, by bisection on a calibration text.

Letters: ``N`` blocks of text, ``S`` tokens of a block, ``B`` blocks of a batch, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cap_hf.corpora import token_blocks
from cap_hf.evaluation.measures import paired_change
from cap_hf.evaluation.routing import RoutingMeter
from cap_hf.modeling import CAPMoEModel

__all__ = ["MEASURES", "ThresholdChoice", "ThresholdStep", "choose_threshold"]

MEASURES = {"perplexity": "relative rise of perplexity", "flips": "share of positions whose most likely next token is another"}
BLOCK = 512  # tokens, or the model's context where that is shorter


@dataclass(frozen=True)
class ThresholdStep:
    """One threshold that was tried."""

    threshold: float
    cost: float
    """The measure, as a share: 0.01 is 1 %."""
    upper_bound: float
    """One-sided confidence bound of the cost."""
    devices_per_token: float
    score_kept: float


@dataclass(frozen=True)
class ThresholdChoice:
    """The highest threshold whose upper bound is within the budget, and what was tried on the way."""

    threshold: float
    """0 where even the lowest threshold costs too much."""
    measure: str
    budget: float
    confidence: float
    cost: float
    upper_bound: float
    devices_per_token: float
    devices_unpruned: float
    num_tokens: int
    steps: tuple[ThresholdStep, ...]

    @property
    def saved(self) -> float:
        """Share of devices per token that pruning takes away."""
        return 1 - self.devices_per_token / self.devices_unpruned

    def __str__(self) -> str:
        words = {"perplexity": "perplexity", "flips": "flips of the most likely token"}[self.measure]
        tried = f"{len(self.steps) - 1} thresholds on {self.num_tokens:,} tokens"
        if self.threshold == 0:
            held = f"within {self.budget:.2%} at {100 * self.confidence:g}% confidence"
            return f"p = 0: none of {tried} keeps {words} {held}; give more text or a larger budget"
        return (
            f"p = {self.threshold:g}: {words} +{self.cost:.2%} (at most +{self.upper_bound:.2%} at {100 * self.confidence:g}% confidence, "
            f"budget {self.budget:.2%}), devices per token {self.devices_unpruned:.2f} -> {self.devices_per_token:.2f} "
            f"({-self.saved:+.0%}); {tried}"
        )


def choose_threshold(
    model: CAPMoEModel,
    tokenizer: Any,
    texts: Sequence[str],
    budget: float,
    measure: str = "perplexity",
    rule: str = "device",
    confidence: float = 0.95,
    resolution: float = 0.005,
    num_tokens: int = 16_384,
    batch_size: int = 8,
    progress: bool = True,
) -> ThresholdChoice:
    """Bisect p until it is known to ``resolution``; every rank calls with the same, and the model's own pruning stays as it was.

    A threshold holds the budget if the upper confidence bound of its cost does: Student's t on the blocks, each paired with
    itself at p = 0, and for flips at least Clopper and Pearson's bound. Give some dozen blocks or more, for a handful of them
    says little about the others. What is returned has been measured, whether or not costs rise evenly with p.

    Args:
        texts: calibration text, like what the model is used for.
        budget: the most it may cost: 0.01 is 1 % perplexity, or 1 % flips.
        measure: one of ``MEASURES``.
        rule: "device" or "expert".
        confidence: of the bound, from 0.5, which takes the measured cost itself, to 0.9999.
        resolution: p is a multiple of it.
        num_tokens: of the text, at most.
        batch_size: blocks per forward.

    Raises:
        ValueError: an argument out of range, or a text of fewer than two blocks.
    """
    check_choice(budget, measure, rule, confidence, resolution, num_tokens, batch_size)
    blocks = _blocks(model, tokenizer, texts, num_tokens)
    scorer = _Scorer(model, blocks, batch_size)
    before = model.cap_config
    low, high = 0, math.ceil(1 / resolution - 1e-9)  # in units of the resolution: holds the budget; does not
    try:
        steps = [scorer.step("none", 0.0, measure, confidence)]
        with tqdm(total=math.ceil(math.log2(high)), desc="thresholds", disable=model.group.rank > 0 or not progress) as bar:
            while high - low > 1:
                middle = (low + high) // 2
                bar.set_description(f"p = {middle * resolution:g}")
                steps.append(scorer.step(rule, round(middle * resolution, 10), measure, confidence))
                low, high = (middle, high) if steps[-1].upper_bound <= budget else (low, middle)
                bar.update()
    finally:
        model.set_pruning(before.pruning, before.prune_threshold)
    chosen = next(step for step in steps if step.threshold == round(low * resolution, 10))
    return ThresholdChoice(
        chosen.threshold, measure, budget, confidence, chosen.cost, chosen.upper_bound, chosen.devices_per_token,
        steps[0].devices_per_token, blocks.size, tuple(steps),
    )  # fmt: skip


def check_choice(budget: float, measure: str, rule: str, confidence: float, resolution: float, num_tokens: int, batch_size: int) -> None:
    """ValueError for an argument of ``choose_threshold`` that is out of range."""
    if not 0 < budget < math.inf:
        raise ValueError(f"budget is {budget}; it must be above 0, as a share: 0.01 is 1 %")
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}; choose one of {', '.join(MEASURES)}")
    if rule not in ("device", "expert"):
        raise ValueError(f"pruning rule {rule!r} is unknown; choose device or expert")
    if not 0.5 <= confidence <= 0.9999:
        raise ValueError(f"confidence is {confidence}; it must be from 0.5 to 0.9999")
    if num_tokens < 2:
        raise ValueError(f"num_tokens is {num_tokens}; it must be two blocks of text or more, {2 * BLOCK} tokens with a context that long")
    if batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be 1 or more rows")
    if not 0.0001 <= resolution <= 0.5:
        raise ValueError(f"resolution is {resolution}; it must be from 0.0001 to 0.5")


def _blocks(model: CAPMoEModel, tokenizer: Any, texts: Sequence[str], num_tokens: int) -> np.ndarray:
    length = min(BLOCK, getattr(model.config, "max_position_embeddings", BLOCK))
    if num_tokens < 2 * length:
        raise ValueError(f"num_tokens is {num_tokens}; at least {2 * length}, two blocks, are needed to tell a change from chance")
    blocks = token_blocks(tokenizer, texts, length, num_tokens // length)
    if len(blocks) < 2:
        raise ValueError(f"the calibration text has less than {2 * length} tokens, two blocks; give more text")
    return blocks


class _Scorer:
    """Scores the blocks at one threshold after the other; block i belongs to rank i modulo R, whoever runs it."""

    def __init__(self, model: CAPMoEModel, blocks_NS: np.ndarray, batch_size: int) -> None:
        self.model, self.blocks_NS, self.meter = model, torch.from_numpy(blocks_NS), RoutingMeter(model)
        num_ranks = model.layout.num_ranks
        self.own = range(model.group.rank, len(blocks_NS), num_ranks) if model.group.size > 1 else range(len(blocks_NS))
        # one process plays rank i modulo R in row i of a batch, so a batch holds whole rounds
        self.batch = batch_size if model.group.size > 1 else -(-batch_size // num_ranks) * num_ranks
        self.unpruned: tuple[np.ndarray, list[torch.Tensor]] | None = None

    def step(self, rule: str, threshold: float, measure: str, confidence: float) -> ThresholdStep:
        """Cost of one threshold against p = 0, which must come first."""
        from scipy.stats import beta, t

        self.model.set_pruning(rule, threshold)
        nats_N, best = self._run()
        if self.unpruned is None:
            self.unpruned = nats_N, best
        flips_N = self._of_all([float((now != then).sum()) for now, then in zip(best, self.unpruned[1], strict=True)])
        means = self.meter.means()
        positions_N = np.full(len(nats_N), self.blocks_NS.shape[1] - 1)
        change = paired_change(nats_N - self.unpruned[0] if measure == "perplexity" else flips_N, positions_N)
        cost, upper = change.change, change.change + t.ppf(confidence, len(nats_N) - 1) * (change.change_stderr or 0.0)
        if measure == "perplexity":
            cost, upper = (math.expm1(min(value, 700.0)) for value in (cost, upper))
        elif threshold > 0:  # few flips say little of their spread: no less than if positions were independent
            flips, positions = int(flips_N.sum()), int(positions_N.sum())
            upper = max(upper, beta.ppf(confidence, flips + 1, positions - flips)) if flips < positions else 1.0
        return ThresholdStep(threshold, float(cost), float(upper), means["devices_per_token"], means["score_kept"])

    @torch.no_grad()
    def _run(self) -> tuple[np.ndarray, list[torch.Tensor]]:
        """Nats of every block, (N,), and the most likely next tokens of this rank's blocks, (S - 1,) each."""
        model, nats, best = self.model, [], []
        self.meter.reset()
        model.attach(self.meter)
        try:
            with model.group.all_or_none(), model.joined() if model.group.size > 1 else nullcontext():
                for start in range(0, len(self.own), self.batch):
                    ids_BS = self.blocks_NS[self.own[start : start + self.batch]].to(model.device)
                    logits_BSV = model(input_ids=ids_BS, use_cache=False).logits[:, :-1].float()
                    losses_BS = torch.nn.functional.cross_entropy(logits_BSV.transpose(1, 2), ids_BS[:, 1:], reduction="none")
                    nats += losses_BS.sum(1).tolist()
                    best += list(logits_BSV.argmax(-1).cpu())
        finally:
            model.detach(self.meter)
        return self._of_all(nats), best

    def _of_all(self, values: Sequence[float]) -> np.ndarray:
        """This rank's blocks' values with those of the others, (N,), in the order of the blocks."""
        by_rank = self.model.group.gather_json(list(values))
        together = np.empty(len(self.blocks_NS))
        for rank, each in enumerate(by_rank):
            together[rank :: len(by_rank)] = each
        return together
