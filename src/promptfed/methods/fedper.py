"""FedPer: the body is shared, every client has a head of its own; both are trained together.

Arivazhagan et al., "Federated Learning with Personalization Layers" (2019).
"""

from typing import ClassVar

from ..method import Method


class FedPer(Method):
    paper: ClassVar[str] = "Arivazhagan et al., 2019"
    private: ClassVar[tuple[str, ...]] = ("head",)
    needs: ClassVar[tuple[str, ...]] = ("body", "head")
