"""The embedded models: small, but trained on real text, so that routing, pruning and perplexity mean something."""

from __future__ import annotations

from pathlib import Path

__all__ = ["EMBEDDED_MODELS", "embedded_model"]

EMBEDDED_MODELS = ("tiny_qwen3_moe", "tiny_deepseek_v2")


def embedded_model(name: str = "tiny_qwen3_moe") -> Path:
    """Folder of an embedded checkpoint, for any ``from_pretrained``; ValueError for an unknown name."""
    if name not in EMBEDDED_MODELS:
        raise ValueError(f"embedded model {name!r} is not known; choose one of {', '.join(EMBEDDED_MODELS)}")
    return Path(__file__).parent / name
