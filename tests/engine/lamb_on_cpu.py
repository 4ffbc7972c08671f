"""LAMB by torch's operators, with the arguments of DeepSpeed's FusedLamb, as a piece like it."""

import torch

from megatron.config.pieces import load_pieces
from tests.helpers.launching import ROOT

EXAMPLE = load_pieces(str(ROOT / "examples/extend/lamb.py")).optimizer


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2), with the bias correction of Adam."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                state = self.state[p]
                moments = [
                    state.setdefault(n, torch.zeros_like(p)) for n in ("exp_avg", "exp_avg_sq")
                ]
                state["step"] = step = state.get("step", 0) + 1
                moments[0].lerp_(p.grad, 1 - beta1)
                moments[1].lerp_(p.grad.square(), 1 - beta2)
                mean = moments[0] / (1 - beta1**step)
                square = moments[1] / (1 - beta2**step)
                update = mean / (square.sqrt() + eps) + group["weight_decay"] * p
                of_weights = p.norm()
                of_update = update.norm()
                ratio = of_weights / of_update if of_weights > 0 and of_update > 0 else 1.0
                p.sub_(group["lr"] * ratio * update)


def plain(groups, settings):
    betas = settings.adam_beta1, settings.adam_beta2
    return Lamb(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps)


class Whole(EXAMPLE):
    def make(self, parameters):
        return plain(parameters, self.settings)


PIECES = {"optimizer": Whole}
