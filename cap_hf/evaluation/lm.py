"""``CapLM``: a CAPMoEModel as lm-evaluation-harness sees a model, and what it notes besides the answers.

Letters: ``B`` rows of a batch, ``S`` positions, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from cap_hf.evaluation.routing import RoutingMeter
from cap_hf.modeling import CAPMoEModel

__all__ = ["CapLM"]


class CapLM(HFLM):
    """Every rank gives lm-evaluation-harness all answers; requests are shared out by document, in turns.

    One process that plays all ranks answers each rank's documents as that rank would, so that pruning, which depends on
    where a token is, comes out the same. Without pruning it answers all at once, as the stock model does.

    Args:
        model: the model, on every rank alike.
        tokenizer: its tokenizer; one without a padding token pads with its end-of-text token.
        batch_size: rows per forward.
        progress: told how many requests (windows, of whole texts) this rank has answered since the last time.
    """

    def __init__(
        self, model: CAPMoEModel, tokenizer: Any, batch_size: int = 8, progress: Callable[[int], None] = lambda count: None
    ) -> None:
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None and tokenizer.unk_token_id is None:
            raise ValueError("the tokenizer has no padding, end-of-text or unknown token to fill up batches with; set tokenizer.pad_token")
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
        self.wrapped, self.progress = model, progress
        self.cache_hook: Any = _AnswerCounter(self)
        self.meter = RoutingMeter(model)
        self.truncated = 0
        self.divergence: list[tuple[float, int]] | None = None
        """Of each scored continuation: the sum over its positions of KL(p = 0 || as pruned), in nats, and their number."""
        self._unpruned_BSV: torch.Tensor | None = None
        self._row = 0
        self._rows: set[tuple[int, ...]] = set()
        self._lengths: dict[str, int] = {}

    @contextmanager
    def measuring(self, divergence: bool) -> Iterator[None]:
        """Count anew inside; with ``divergence``, each scored batch also runs without pruning, to be compared."""
        self.meter.reset()
        self.truncated, self.divergence = 0, [] if divergence else None
        self.wrapped.attach(self.meter)
        try:
            yield
        finally:
            self.wrapped.detach(self.meter)

    def num_tokens(self, text: str) -> int:
        """Tokens of a text; remembered, for texts are long and asked for at every setting."""
        if text not in self._lengths:
            self._lengths[text] = len(self.tok_encode(text))
        return self._lengths[text]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation in nats, and whether greedy decoding gives it."""
        return [(float(value), bool(greedy)) for value, greedy in self._shared(super().loglikelihood, requests)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text in nats."""
        return [float(value) for value in self._shared(super().loglikelihood_rolling, requests)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy or sampled continuations, up to a stop sequence."""
        return [str(value) for value in self._shared(super().generate_until, requests)]

    def _shared(self, answer: Callable[..., list[Any]], requests: list[Any]) -> list[Any]:
        """All answers, in the order of ``requests``, on every rank."""
        model = self.wrapped
        owners = owners_of(requests, model.layout.num_ranks)

        def answered(rank: int) -> list[Any]:
            own = [request for request, owner in zip(requests, owners, strict=True) if owner == rank]
            return answer(own, disable_tqdm=True) if own else []

        if model.group.size > 1:
            with model.group.all_or_none(), model.joined():
                mine = answered(model.group.rank)
            by_rank = model.group.gather_json(mine)
        elif model.cap_config.prune_threshold == 0 or model.layout.num_ranks == 1:
            return answer(requests, disable_tqdm=True)
        else:
            by_rank = []
            for rank in range(model.layout.num_ranks):
                with model.playing(rank):
                    by_rank.append(answered(rank))
        rests = [iter(answers) for answers in by_rank]
        return [next(rests[owner]) for owner in owners]

    def divergences(self) -> list[list[float]]:
        """``divergence`` of all ranks (each must call), ready for JSON."""
        return [each for rank in self.wrapped.group.gather_json(self.divergence or []) for each in rank]

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        self.truncated += sum(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        self._rows = {tuple((context + continuation)[-(self.max_length + 1) :][:-1]) for _, context, continuation in requests}
        answers = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        self.progress(sum(text is None for text, _, _ in requests))  # windows of whole texts
        return answers

    def tok_batch_encode(self, strings: Any, *args: Any, left_truncate_len: int | None = None, **kwargs: Any) -> Any:
        """As the stock model's; counts the prompts that lose their beginning."""
        if left_truncate_len is not None:
            self.truncated += sum(len(self.tok_encode(text)) > left_truncate_len for text in strings)
        return super().tok_batch_encode(strings, *args, left_truncate_len=left_truncate_len, **kwargs)

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        self.meter.real = _real_positions(inps, self._rows)
        logits_BSV = super()._model_call(inps, attn_mask, labels)
        self.meter.real = None
        self._row, self._unpruned_BSV = 0, None
        if self.divergence is not None:
            with self.wrapped.unpruned(), self.meter.paused():
                self._unpruned_BSV = super()._model_call(inps, attn_mask, labels).log_softmax(-1, dtype=torch.float32)
        return logits_BSV

    def _select_cont_toks(self, logits: torch.Tensor, contlen: int | None = None, inplen: int | None = None) -> torch.Tensor:
        chosen = super()._select_cont_toks(logits, contlen, inplen)
        if self._unpruned_BSV is not None and self.divergence is not None:
            unpruned = super()._select_cont_toks(self._unpruned_BSV[self._row], contlen, inplen)
            gap = (unpruned.exp() * (unpruned - chosen.float())).sum(-1)
            self.divergence.append((float(gap.sum()), len(gap)))
        self._row += 1
        return chosen


def _real_positions(ids_BS: torch.Tensor, rows: Collection[tuple[int, ...]]) -> torch.Tensor:
    """Where ``ids_BS`` holds one of ``rows``, (B, S) bool; behind its end a row is filled up with id 0, which may be a word too."""
    real_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    for real_S, row in zip(real_BS, ids_BS.tolist(), strict=True):
        end = len(row)
        while end and row[end - 1] == 0:
            end -= 1
        real_S[: next((length for length in range(end, len(row) + 1) if tuple(row[:length]) in rows), end)] = True
    return real_BS


class _AnswerCounter:
    """In place of the harness's cache: told of each answer."""

    def __init__(self, lm: CapLM) -> None:
        self.lm = lm

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Whole texts have been counted by their windows."""
        self.lm.progress(int(kind != "loglikelihood_rolling"))


def owners_of(requests: Sequence[Any], num_ranks: int) -> list[int]:
    """The rank that answers each request: documents in turns, all requests of one document together."""
    documents = [(request.task_name, request.doc_id) for request in requests]
    turn = {document: number % num_ranks for number, document in enumerate(dict.fromkeys(documents))}
    return [turn[document] for document in documents]
