"""Translated help says what the English page says: same parts, code and links, and names as on the node."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from anygpu.pipelines.registry import FAMILIES
from test_docs import NODES
from test_web import translated

HELP = Path(__file__).resolve().parent.parent / "web" / "docs"
LANGUAGES = {"zh": "一-鿿"}  # of the help beside English, with the letters of each; names and tooltips have more


@cache
def pieces(node_id: str, language: str) -> list[tuple[str, str]]:
    """Headings, paragraphs (pictures too) and items of lists of a page in their order, each with its kind.

    An item's kind is ``item``, the number of its list and its place there.
    """
    found: list[tuple[str, str]] = []
    lists = 0
    for block in re.split(r"\n{2,}", (HELP / node_id / f"{language}.md").read_text(encoding="utf-8").strip()):
        if block.startswith("- "):
            lists += 1
            items = (" ".join(item.split()) for item in re.split(r"\n(?=- )", block))
            found += [(f"item {lists}.{place}", item) for place, item in enumerate(items)]
        else:
            kind = block[: len(block) - len(block.lstrip("#"))] or "paragraph"
            found.append((kind, " ".join(block.split("\n"))))
    return found


def kept(piece: str) -> tuple[list[str], list[str]]:
    """What no language changes in a piece: its code, and where its links and pictures lead; the order may differ."""
    return sorted(re.findall(r"`[^`]*`", piece)), sorted(re.findall(r"\]\(([^)]*)\)", piece))


def is_prose(kind: str, piece: str) -> bool:
    """Whether a piece has a few words beside code, addresses and the choices of an input."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", piece)
    text = text.partition(":")[2] if kind.startswith("item") else text
    return len(re.findall(r"\b[a-z]{2,}\b", text)) >= 4


@pytest.mark.parametrize("node_id", NODES)
def test_help_exists_in_its_languages_and_no_other(node_id):
    assert {path.stem for path in (HELP / node_id).glob("*.md")} == {"en", *LANGUAGES}


def pages(language: str) -> Iterator[tuple[str, list[tuple[str, str]], list[tuple[str, str]]]]:
    """Each node with its English page and that of a language; one that is missing fails the test above alone."""
    for node_id in NODES:
        if all((HELP / node_id / f"{name}.md").is_file() for name in ("en", language)):
            yield node_id, pieces(node_id, "en"), pieces(node_id, language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_translated_help_has_the_parts_code_and_links_of_the_english(language):
    """Lists each piece that differs; a page with other headings, paragraphs or items is named once."""
    wrong = []
    for node_id, english, other in pages(language):
        if [kind for kind, _ in english] != [kind for kind, _ in other]:
            wrong.append(f"{node_id}: other headings, paragraphs or items")
            continue
        pairs = zip(english, other, strict=True)
        wrong += [f"{node_id} {kind}: {said}" for (kind, said), (_, text) in pairs if kept(said) != kept(text)]
    assert not wrong


@pytest.mark.parametrize("language", LANGUAGES)
def test_translated_help_is_translated(language):
    """No sentence is the English one, and each has the language's own letters."""
    letters = re.compile(f"[{LANGUAGES[language]}]")
    left = []
    for node_id, english, other in pages(language):
        for (kind, said), (_, text) in zip(english, other, strict=False):
            if is_prose(kind, said) and (said == text or not letters.search(text)):
                left.append(f"{node_id} {kind}: {said}")
    assert not left


USERS = re.compile(r"- `\w+`(?:: |：)(.*)")


def users(piece: str) -> list[str]:
    """The families that a list of who uses what names for an input, or its one word for all of them."""
    match = USERS.fullmatch(piece)
    return [] if match is None else re.split(r", |、", match[1])


@pytest.mark.parametrize("language", LANGUAGES)
def test_translated_help_answers_the_same(language):
    """The lists of who uses what name the same families on all pages, and say all in one word."""
    titles = {family.title for family in FAMILIES.values()}
    pairs = [pair for _, english, other in pages(language) for pair in zip(english, other, strict=False)]
    answers = [(users(said), users(text)) for (_, said), (_, text) in pairs]
    named = [(said, text) for said, text in answers if said and titles.issuperset(said)]
    assert len(named) > 10 and [pair for pair in named if pair[0] != pair[1]] == []
    assert len({tuple(text) for said, text in answers if said == ["all"]}) == 1


@pytest.mark.parametrize("language", LANGUAGES)
def test_translated_help_calls_nodes_as_the_node_does(language):
    nodes = translated(language)
    wrong = [node for node, _, ((_, title), *_) in pages(language) if title != f"# {nodes[node]['display_name']}"]
    assert not wrong
