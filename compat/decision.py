"""Decisions as data; they become text only where they are shown: on a node, in a report, on the panel."""

from __future__ import annotations

from dataclasses import dataclass

AUTO, CHOSEN = "auto", "chosen"


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that was decided or found."""

    subject: str  # such as ``attention``
    verdict: str
    why: str = ""
    source: str = ""  # ``auto``, ``chosen`` by the user, or a thread; empty for a plain fact
    alarming: bool = False  # it needs attention
    guessed: bool = False  # it may be wrong, so that its reason is read beside it

    @property
    def reason(self) -> str:
        """Reason and source: ``auto: 9.1 GB of weights leave a quarter of 22.0 GB free``, or a thread behind it."""
        if self.source in (AUTO, CHOSEN):
            return ": ".join(filter(None, (self.source, self.why)))
        return "; ".join(filter(None, (self.why, self.source)))

    @property
    def brief(self) -> str:
        """The choice without its reason, unless it was guessed."""
        return f"{self.subject} {self.verdict}" + (f": {self.why}" if self.guessed else "")

    def __str__(self) -> str:
        return f"{self.subject} {self.verdict}" + (f": {self.reason}" if self.reason else "")

    def as_json(self) -> dict[str, str]:
        """For a route: ``subject``, ``verdict`` and ``why``, which is the whole reason."""
        return {"subject": self.subject, "verdict": self.verdict, "why": self.reason}
