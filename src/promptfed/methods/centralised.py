"""Centralised: what is tuned, trained on all clients' training data in one place. The ceiling of a comparison."""

from pydantic import model_validator

from .. import Method, UserError


class Centralised(Method):
    """FedAvg with a single client that holds the training data of all; each client keeps its validation and test data.
    A round draws as many samples as one in which all clients take part."""

    paper = "the usual upper bound"
    reference = True
    centralised = True
    sends = "training data"

    @model_validator(mode="after")
    def _one_model(self) -> "Centralised":
        if self.finetune_epochs or "private" in self.tuning.role_names():
            raise UserError(
                "method.name: centralised trains one model on all training data, and takes no +ft, +pt or +st, "
                "which train on a client's own"
            )
        return self
