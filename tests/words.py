"""Count the English words of the documents, page by page: ``python tests/words.py`` (make words).

A word stands between two blanks and has a letter or a digit. What a script writes is not counted: tables between
``<!-- NAME -->`` and ``<!-- end -->``, and the list of inputs of a help page, which is the schema's.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 45_000
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "web/docs/*/en.md")
CARDS = ("pipelines/demo/models/*/README.md", "paint/models/*/README.md")
MADE = re.compile(r"^<!-- (?!end)[^\n]+ -->$.*?^<!-- (?:end|/\w+) -->$", re.MULTILINE | re.DOTALL)
INPUTS = re.compile(r"^## Inputs\n\n(?:(?:- |  ).*\n)+", re.MULTILINE)


def counted() -> Iterator[tuple[str, int]]:
    """Each page, relative to the root, with the words that a person wrote."""
    for path in (path for pattern in (*PAGES, *CARDS) for path in sorted(ROOT.glob(pattern))):
        text = INPUTS.sub("", MADE.sub("", path.read_text(encoding="utf-8")))
        yield path.relative_to(ROOT).as_posix(), len(re.findall(r"\S*[A-Za-z0-9]\S*", text))


if __name__ == "__main__":
    rows = list(counted())
    for page, count in [*rows, ("all", sum(count for _, count in rows))]:
        sys.stdout.write(f"{count:6d} {page}\n")
