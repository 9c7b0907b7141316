"""Texts of any length: only as much is tokenised as an encoder reads, with the tokens that the whole text has."""

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
from anygpu.compat import packages
from anygpu.compat.errors import InputError
from anygpu.compat.packages import MOST_CHARACTERS, beginning
from anygpu.pipelines import stages
from anygpu.pipelines.base import PromptRequest
from anygpu.pipelines.load.folder import load
from anygpu.pipelines.pipeline import Pipeline
from anygpu.pipelines.requests import LoadRequest
from anygpu.pipelines.text.t5 import shortened
from transformers import AutoTokenizer

WORDS = ["a", "fox", "jumps", "lazy", "dog", "東京", "の", "Ünïcödé", "é́́", "👩\u200d👧", "🦊", "☃", "\u200b"]
WORDS += ["don't", "12345", "<extra_id_0>", "\n"]
RANGES = ((32, 0x250), (0x300, 0x370), (0x4E00, 0x9000), (0x1F300, 0x1F700))
CORE = Path.home() / "comfy" / "ComfyUI" / "comfy"
VOCABULARIES = {
    "t5": "text_encoders/t5_tokenizer",
    "clip": "sd1_tokenizer",
    "qwen": "text_encoders/qwen25_tokenizer",
    "byt5": "text_encoders/byt5_tokenizer",
}
LONG = {
    "words": "a red fox " * 10**6,
    "one word": "ab" * 5 * 10**6,
    "unknown": "☃" * 10**7,
    "space": " " * 10**7 + "fox",
    "lines": "fox\n" * 25 * 10**5,
}


def text(rng: random.Random, length: int) -> str:
    """Words, runs of one character, letters of many scripts and long words, ``length`` characters and more."""
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        kind = rng.randrange(10)
        if kind < 7:
            parts += [rng.choice(WORDS) + rng.choice((" ", "  ", "\n", ""))] * rng.choice((1, 1, 20))
        elif kind == 7:
            parts.append(rng.choice(" \n\t\u3000☃é") * rng.choice((1, 5, 60, 400)))
        elif kind == 8:
            parts.append("".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(rng.randrange(1, 30))))
        else:
            parts.append("".join(rng.choice("abcdefghij") for _ in range(rng.randrange(1, 200))))
    return "".join(parts)


def different(tokenizer: Any, count: int) -> tuple[int, int]:
    """How many of so many texts have other first tokens than as a whole, and how many were cut."""
    wrong, cut = 0, 0
    for number in range(count):
        rng = random.Random(number)
        room, whole = rng.choice((8, 77, 256)), text(rng, rng.choice((200, 2_000, 9_000)))
        start = beginning(tokenizer, whole, room)
        ids = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"][:room] for part in (whole, start)]
        wrong, cut = wrong + (ids[0] != ids[1]), cut + (len(start) < len(whole))
    return wrong, cut


@pytest.mark.parametrize("folder", ["mochi/tokenizer", "hunyuan_video/tokenizer", "hunyuan_video/tokenizer_2"])
def test_the_beginning_has_the_tokens_of_the_whole(tiny_folder: Path, folder: str) -> None:
    name, _, part = folder.partition("/")
    wrong, cut = different(AutoTokenizer.from_pretrained(tiny.build(name, tiny_folder) / part), 8)
    assert not wrong and cut >= 3


@pytest.mark.full
@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_beginning_has_the_tokens_of_the_whole_in_published_vocabularies(name: str) -> None:
    folder = CORE / VOCABULARIES[name]
    if not folder.is_dir():
        pytest.skip(f"no {folder}: ComfyUI ships it")
    wrong, cut = different(AutoTokenizer.from_pretrained(folder), 1000)
    assert not wrong and cut > 300


@pytest.fixture(scope="module")
def mochi(tiny_folder: Path) -> Pipeline:
    return load(LoadRequest(tiny.build("mochi", tiny_folder), device="cpu"))


@pytest.mark.parametrize("name", LONG)
def test_ten_megabytes_are_cut_before_they_are_tokenised(
    mochi: Pipeline, recorded: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, lengths = recorded(), [0]
    tokenizer: Any = type(mochi.tools["tokenizer"])
    plain = tokenizer.__call__

    def counted(self: Any, given: Any, *rest: Any, **more: Any) -> Any:
        lengths.append(max(map(len, [given] if isinstance(given, str) else given)))
        return plain(self, given, *rest, **more)

    monkeypatch.setattr(tokenizer, "__call__", counted)
    monkeypatch.setattr(packages, "MOST_CHARACTERS", 2**12)  # of runs of space: the real limit takes a second here
    prompt = stages.encode_prompt(mochi, PromptRequest(LONG[name], max_tokens=32), progress)
    assert prompt.embeds["prompt_embeds"].shape[1] <= 32 and max(lengths) <= 2**12 < MOST_CHARACTERS
    assert any("is shortened from more than" in line or "is read up to character" in line for line in progress.said)


@pytest.mark.full
def test_a_text_is_not_cut_inside_a_character(recorded: Any) -> None:
    """Published vocabularies have one token for the sign of a broken character, which tiny ones spell."""
    folder, whole, progress = CORE / VOCABULARIES["qwen"], "a fox 東京の🦊鿿" * 8, recorded()
    if not folder.is_dir():
        pytest.skip(f"no {folder}: ComfyUI ships it")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for room in range(20, 30):
        cut = shortened(tokenizer, whole, room, "prompt", progress)
        assert whole.startswith(cut) and len(tokenizer(cut)["input_ids"]) <= room, cut
    assert len(progress.said) == 10 and "\ufffd" not in "".join(progress.said), progress.said


class Cancel(BaseException):
    """What the host raises."""


def test_a_cancel_ends_the_search_for_the_beginning(tiny_folder: Path) -> None:
    tokenizer, asked = AutoTokenizer.from_pretrained(tiny.build("mochi", tiny_folder) / "tokenizer"), list[int]()

    def check() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise Cancel

    with pytest.raises(Cancel):
        beginning(tokenizer, LONG["space"], 32, check)


@pytest.mark.parametrize("given", [{"sections": ("a",) * 1025}, {"template": "{}" + " " * 65_536}])
def test_there_are_limits_to_sections_and_templates(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"(1,025 section|65,538 letters).*; expected at most"):
        PromptRequest("a fox", **given)
