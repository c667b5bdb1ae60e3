"""Losses of training under pruning. Pure functions.

Letters: ``B`` rows, ``S`` positions, ``V`` vocabulary, ``T`` = B * S tokens, ``E`` experts, ``K`` experts per token, ``R`` ranks.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["distillation_loss", "locality_loss"]


def distillation_loss(logits_BSV: torch.Tensor, teacher_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Mean over predicted tokens of KL(teacher || student) of the next-token distributions, in nats; label -100 is not predicted."""
    counted_P = labels_BS[:, 1:].flatten() != -100
    student, teacher = (logits[:, :-1].flatten(0, 1)[counted_P].float().log_softmax(-1) for logits in (logits_BSV, teacher_BSV))
    return functional.kl_div(student, teacher, log_target=True, reduction="sum") / counted_P.sum().clamp(min=1)


def locality_loss(
    router_logits_TE: torch.Tensor, expert_to_rank_E: torch.Tensor, source_T: torch.Tensor, num_ranks: int, top_k: int
) -> torch.Tensor:
    """Ranks other than its own that a token would visit if K experts were drawn by the router's probabilities, mean over tokens.

    A rank whose experts have the share q of a token's probability is missed by K independent draws with (1 - q)^K. The sum
    over ranks of what is not missed falls when the probability gathers on few ranks or on the token's own, which is free.
    """
    prob_TE = router_logits_TE.float().softmax(-1)
    share_TR = prob_TE.new_zeros((len(prob_TE), num_ranks)).index_add(1, expert_to_rank_E, prob_TE)
    visited_TR = 1 - (1 - share_TR).clamp(min=0) ** top_k
    return visited_TR.scatter(1, source_T[:, None], 0.0).sum(1).mean()
