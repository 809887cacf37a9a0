"""FedNova: clients that take more local steps do not count more: their changes are normalised before they are averaged.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (NeurIPS 2020).
"""

from pydantic import model_validator

from .. import Method, State, Update, UserError
from .. import params as P


class FedNova(Method):
    paper = "Wang et al., NeurIPS 2020"
    by_mean = True

    @model_validator(mode="after")
    def _sgd(self) -> "FedNova":
        if self.optimizer != "sgd":
            raise UserError(
                f"method.optimizer = {self.optimizer!r}: fednova knows how far SGD goes in so many steps, use 'sgd'"
            )
        return self

    def stride(self, n: int) -> float:
        """|a_i|_1 of a client with n samples: how often its gradients count in its change. Without momentum rho it is
        the number of steps tau, otherwise the sum over steps k of (1 - rho^k) / (1 - rho)."""
        steps, rho = max(self.phase().length(n), 1), self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """x <- x + tau_eff sum p_i (y_i - x) / |a_i|_1, with p_i by samples and tau_eff = sum p_i |a_i|_1"""
        lengths = [self.stride(u.n) for u in updates]
        weights = [u.n / a for u, a in zip(updates, lengths, strict=True)]
        samples = sum(u.n for u in updates)
        tau = sum(u.n * a for u, a in zip(updates, lengths, strict=True)) / samples
        scale = tau * sum(weights) / samples  # 1 where all clients take as many steps
        mean = P.mean([u.up for u in updates], weights)
        return {**state, **{name: state[name] + scale * (p - state[name]) for name, p in mean.items()}}
