"""What methods that tune a part of a frozen model have in common."""

from pydantic import Field

from .. import Method


class OnFrozen(Method):
    """With the learning rate and momentum of the plug-ins on frozen models."""

    lr: float = Field(0.01, gt=0, description="local learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
