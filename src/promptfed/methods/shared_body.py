"""FedPer, FedRep and FedBABU: the body is shared, and every client has a head of its own; LG-FedAvg: the reverse."""

from pydantic import Field

from .. import Method, Phase


class FedPer(Method):
    """Both are trained together. Arivazhagan et al., "Federated Learning with Personalization Layers" (2019)."""

    paper = "Arivazhagan et al., 2019"
    private = ("head",)
    needs = ("body", "head")


class FedRep(FedPer):
    """First the head, then the body. Collins et al., "Exploiting Shared Representations for Personalized Federated
    Learning" (ICML 2021), Algorithm 1."""

    paper = "Collins et al., ICML 2021"

    head_epochs: int = Field(5, ge=0, description="epochs on the head, with the body frozen")
    head_lr: float = Field(0.01, gt=0, description="learning rate of the head")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (
            self.phase(("head",), lr=self.head_lr, epochs=self.head_epochs, name="head"),
            self.phase(("body",), name="body"),
        )


class FedBabu(FedPer):
    """The head keeps its initial value until a final fine-tuning. Oh et al., "FedBABU: Towards Enhanced Representation
    for Federated Image Classification" (ICLR 2022), Algorithm 1."""

    paper = "Oh et al., ICLR 2022"

    finetune_steps: int = Field(1, ge=0, description="steps on body and head before evaluation, if no finetune_epochs")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(("body",), name="body"),)

    def adapt(self) -> tuple[Phase, ...]:
        if self.finetune_epochs or not self.finetune_steps:
            return super().adapt()
        return (self.fine_tune(steps=self.finetune_steps),)


class LgFedAvg(Method):
    """The head is shared, and every client has a body of its own. Liang et al., "Think Locally, Act Globally: Federated
    Learning with Local and Global Representations" (2020)."""

    paper = "Liang et al., 2020"
    private = ("body",)
    needs = ("body", "head")
