"""FedAvgM, FedAdagrad, FedAdam and FedYogi: the server's optimiser takes the clients' mean change for a gradient.

The last three are of Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithm 2. Clients are weighted by
their numbers of samples, as in FedAvg.
"""

from abc import abstractmethod

import torch
from pydantic import Field

from .. import Method, Model, Params, State
from .. import params as P

_MOMENTUM, _SECOND = "momentum", "second"  # m and v in the server's state


class FedAvgM(Method):
    """The server's steps have momentum. Hsu, Qi & Brown, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification" (2019)."""

    paper = "Hsu et al., 2019"

    server_lr: float = Field(1.0, gt=0, description="learning rate of the server (eta)")
    server_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the server (beta)")

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, and momentum.* of each."""
        shared = self.shared(init)
        return {**shared, **P.nested(_MOMENTUM, {name: torch.zeros_like(p) for name, p in shared.items()})}

    def down(self, state: State, client: int) -> Params:
        moments = (f"{_MOMENTUM}.", f"{_SECOND}.")
        return {name: p for name, p in super().down(state, client).items() if not name.startswith(moments)}

    def merge(self, state: State, mean: Params) -> State:
        """m <- beta m + Delta, x <- x + eta m, where Delta is the clients' mean minus the model x."""
        change = P.minus(mean, state)
        m = {name: self.server_momentum * p + change[name] for name, p in P.under(state, _MOMENTUM).items()}
        return {**state, **{name: state[name] + self.server_lr * p for name, p in m.items()}, **P.nested(_MOMENTUM, m)}


class _Adaptive(FedAvgM):
    """A step of each coordinate is divided by the root of its mean squared change v, which starts at tau^2."""

    paper = "Reddi et al., ICLR 2021"

    server_lr: float = Field(0.01, gt=0, description="learning rate of the server (eta)")
    server_momentum: float = Field(0.9, ge=0, lt=1, description="decay of the server's first moment (beta_1)")
    tau: float = Field(1e-3, gt=0, description="adaptivity of the server: added to the root of the second moment")

    @abstractmethod
    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """The new v, given the old one and Delta^2."""

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, and momentum.* and second.* of each."""
        v = {name: torch.full_like(p, self.tau**2) for name, p in self.shared(init).items()}
        return {**super().begin(model, init, seed), **P.nested(_SECOND, v)}

    def merge(self, state: State, mean: Params) -> State:
        """m <- beta_1 m + (1 - beta_1) Delta, x <- x + eta m / (sqrt(v) + tau); nothing corrects the bias of m."""
        change, beta = P.minus(mean, state), self.server_momentum
        m = {name: beta * p + (1 - beta) * change[name] for name, p in P.under(state, _MOMENTUM).items()}
        v = {name: self.second(p, change[name].square()) for name, p in P.under(state, _SECOND).items()}
        new = {name: state[name] + self.server_lr * p / (v[name].sqrt() + self.tau) for name, p in m.items()}
        return {**state, **new, **P.nested(_MOMENTUM, m), **P.nested(_SECOND, v)}


class FedAdagrad(_Adaptive):
    """v is the sum of squared changes."""

    server_momentum: float = Field(0.0, ge=0, lt=1, description="decay of the server's first moment (beta_1)")

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return v + square


class FedAdam(_Adaptive):
    """v is a moving mean of squared changes."""

    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the server's second moment (beta_2)")

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


class FedYogi(FedAdam):
    """v moves by a share of the squared change, however far away that is, so that it falls slowly."""

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()
