"""FedRep: a shared body and private heads, trained one after the other.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning" (ICML 2021), Algorithm 1.
"""

from pydantic import Field

from .. import Method, Phase


class FedRep(Method):
    paper = "Collins et al., ICML 2021"
    private = ("head",)
    needs = ("body", "head")

    head_epochs: int = Field(5, ge=0, description="epochs on the head, with the body frozen")
    head_lr: float = Field(0.01, gt=0, description="learning rate of the head")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (
            self.phase(("head",), lr=self.head_lr, epochs=self.head_epochs, name="head"),
            self.phase(("body",), name="body"),
        )
