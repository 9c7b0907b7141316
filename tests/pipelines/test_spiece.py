"""The tokenizer read from ``spiece.model`` equals the one that transformers reads through protobuf."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anygpu.compat.errors import CheckpointError
from anygpu.pipelines import spiece

TEXTS = (
    "a cat walks on the grass", "", "  two   spaces ", "unseen letters: ﬁ Å é 日本 ½ ①", "A<extra_id_3>b </s> c\n\tnew line",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published T5 tokenizer folder as the LTX-Video and Mochi pages have it: no ``tokenizer.json``."""
    sentencepiece = pytest.importorskip("sentencepiece")
    made = tmp_path_factory.mktemp("spiece")
    sentence = "a cat walks on the grass realistic highly detailed quick brown fox jumps over the lazy dog"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentence.split() * 20), model_prefix=str(made / "spiece"), vocab_size=60,
        hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )
    (made / "spiece.vocab").unlink()
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100, "model_max_length": 128}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def test_equals_the_reading_through_protobuf(folder: Path) -> None:
    pytest.importorskip("google.protobuf")
    from transformers import AutoTokenizer

    upstream, ours = AutoTokenizer.from_pretrained(folder, local_files_only=True), spiece.t5_tokenizer(folder)
    assert ours.get_vocab() == upstream.get_vocab()
    assert ours.model_max_length == upstream.model_max_length == 128
    for text in TEXTS:
        assert ours(text)["input_ids"] == upstream(text)["input_ids"], text
    padded = [
        tokenizer(list(TEXTS[:2]), padding="max_length", max_length=16, truncation=True, return_tensors="np")
        for tokenizer in (ours, upstream)
    ]
    assert all((padded[0][key] == padded[1][key]).all() for key in ("input_ids", "attention_mask"))


def test_normalises_as_the_file_says(folder: Path) -> None:
    ours = spiece.t5_tokenizer(folder)
    assert ours("ﬁnd")["input_ids"] == ours("find")["input_ids"]


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_damaged_file_is_one_line(folder: Path, tmp_path: Path, damage: str) -> None:
    whole = (folder / spiece.FILE).read_bytes()
    content = {"cut": whole[: len(whole) // 2 + 1], "text": b"version https://git-lfs.github.com/spec/v1\n", "empty": b""}[damage]
    (tmp_path / spiece.FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged") as raised:
        spiece.t5_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_only_a_file_without_tokenizer_json_is_read_here(folder: Path, tmp_path: Path) -> None:
    assert spiece.is_alone(folder)
    assert not spiece.is_alone(tmp_path)
