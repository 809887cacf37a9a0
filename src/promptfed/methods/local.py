"""Local: every client trains alone, and nothing travels."""

from .. import Method


class Local(Method):
    paper = "the usual lower bound"
    averages = False
    private = ("body", "head")

    def stays(self, name: str) -> bool:
        return True
