"""Local: every client trains alone, and nothing travels."""

from typing import ClassVar

from ..method import Method


class Local(Method):
    paper: ClassVar[str] = "the usual lower bound"
    private: ClassVar[tuple[str, ...]] = ("body", "head")

    def stays(self, name: str) -> bool:
        return True
