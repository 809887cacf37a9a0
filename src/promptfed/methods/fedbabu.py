"""FedBABU: only the body is trained and shared; the head keeps its initial value until a final fine-tuning.

Oh et al., "FedBABU: Towards Enhanced Representation for Federated Image Classification" (ICLR 2022), Algorithm 1.
"""

from pydantic import Field

from .. import Method, Phase


class FedBabu(Method):
    paper = "Oh et al., ICLR 2022"
    private = ("head",)
    needs = ("body", "head")

    finetune_steps: int = Field(1, ge=0, description="steps on body and head before evaluation, if no finetune_epochs")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(("body",), name="body"),)

    def adapt(self) -> tuple[Phase, ...]:
        if self.finetune_epochs or not self.finetune_steps:
            return super().adapt()
        return (self.fine_tune(steps=self.finetune_steps),)
