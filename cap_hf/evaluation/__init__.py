"""Accuracy against the pruning threshold, with lm-evaluation-harness's prompts, filters and metrics."""
