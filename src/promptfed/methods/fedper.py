"""FedPer: the body is shared, every client has a head of its own; both are trained together.

Arivazhagan et al., "Federated Learning with Personalization Layers" (2019).
"""

from .. import Method


class FedPer(Method):
    paper = "Arivazhagan et al., 2019"
    private = ("head",)
    needs = ("body", "head")
