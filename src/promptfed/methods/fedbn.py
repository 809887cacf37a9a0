"""FedBN: parameters of normalisation layers stay with the client, everything else is averaged.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (ICLR 2021). Batch norms here
are affine maps without statistics of a batch; in transformers it is the layer norms that stay.
"""

import re

from .. import Method
from ..tuning import Transparent

# Layer norms are called norm, norm1, norm_pre; a batch norm, multiplied into its convolution, is a scale and a shift of
# some layer (`body.scale` is a CLIP's temperature).
_NORM = re.compile(r"\.norm\w*\.(weight|bias)$|\..+\.(scale|shift)$")


class Norms(Transparent):
    """The tuning that it is around, in which normalisation layers have a role of their own."""

    about = "norms"
    backbones = "transformers"

    def role(self, name: str) -> str:
        role = self.inner.role(name)
        return "norm" if role == "body" and _NORM.search(name) else role

    def role_names(self) -> tuple[str, ...]:
        return ("norm", *self.inner.role_names())


class FedBn(Method):
    paper = "Li et al., ICLR 2021"
    private = ("norm",)
    needs = ("norm",)
    wrapper = Norms
