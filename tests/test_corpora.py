"""Real text: the corpora that need nothing, the local ones where they are, and malformed files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cap_hf.corpora import CORPORA, find_data_dir, load_texts, token_blocks

FIRST_WORDS = {
    "wikitext": "= Robert Boulter =",
    "gsm8k": "Question: Janet",
    "arxiv": "Calculation of prompt diphoton",
    "humaneval": "from typing import List",
    "chat": "Compose an engaging travel blog",
    "mmlu": "Find the degree for the given field extension",
}


class CharacterTokenizer:
    """One token per character, code point as id; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def test_python_needs_no_folder_and_keeps_its_test_part_apart() -> None:
    train, test = load_texts("python", "train"), load_texts("python", "test")
    assert 15 * len(test) < len(train) < 25 * len(test)
    assert not set(train) & set(test)
    assert any("def " in text for text in test)


@pytest.mark.parametrize("name", FIRST_WORDS)
def test_local_corpora(name: str, data_dir: Path) -> None:
    texts = load_texts(name, "test", data_dir)
    assert texts[0].startswith(FIRST_WORDS[name])
    assert set(FIRST_WORDS) | {"python"} == set(CORPORA)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown corpus 'c4'; choose one of wikitext"):
        load_texts("c4")
    with pytest.raises(ValueError, match="unknown split 'dev' of corpus 'python'; choose one of train, test"):
        load_texts("python", "dev")
    with pytest.raises(ValueError, match="'/no/such/folder' does not exist"):
        find_data_dir("/no/such/folder")


def test_a_malformed_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": "a"}\n')
    with pytest.raises(ValueError, match=r"test\.jsonl, row 2: .*question, answer"):
        load_texts("gsm8k", "test", tmp_path)
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" \n \n")
    with pytest.raises(ValueError, match="corpus 'wikitext', split 'test' holds 0 documents"):
        load_texts("wikitext", "test", tmp_path)
    with pytest.raises(ValueError, match="arxiv_abstracts.jsonl"):
        load_texts("arxiv", "test", tmp_path)


def test_token_blocks_join_texts_with_ends_and_drop_the_rest() -> None:
    blocks = token_blocks(CharacterTokenizer(), ["ab", "cde"], block_size=3)
    assert blocks.tolist() == [[0, 97, 98], [0, 99, 100]]
    assert token_blocks(CharacterTokenizer(), ["ab", "cde"], 3, max_blocks=1).tolist() == [[0, 97, 98]]
    assert blocks.dtype == np.int64
    with pytest.raises(ValueError, match="yield 3 tokens, less than one block of 4"):
        token_blocks(CharacterTokenizer(), ["ab"], 4)
