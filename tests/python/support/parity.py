"""The bounds for parity with transformers: how far may our logits be from the exact ones?

The exact logits come from the transformers model evaluated in float64 throughout. (Its norms and
rotary embedding compute in float32 for any type of the model; they are replaced by float64 ones
here.) The model's own evaluation in float32 differs from them only by rounding: its largest
difference E over all positions and tokens is the size of float32 rounding errors in this network.

Ours does the same operations in the same precision; only the order of its sums differs. A sum of k
terms in one running total, the worst order, has about sqrt(k / lanes) times the error of a sum in
that many partial totals, and k is at most a few hundred here. So FLOAT32_FACTOR = 4 times E holds
for any order of summation (measured with the AVX2 kernels over all rows: 0.9 to 1.5 times E).
Mistakes are far outside: a norm's epsilon off by a tenth gives 1600 times E or more, one rotary
frequency off by a thousandth 1300 times.

In bfloat16 the weights are exact (they are saved in bfloat16) and E comes from transformers'
bfloat16 run. Like that run, the engine keeps sums and norms in float32, so BFLOAT16_FACTOR = 2
(measured: 0.4 to 0.7).
"""

from __future__ import annotations

import copy
import os
import re
import sys
from dataclasses import dataclass

import numpy as np

FLOAT32_FACTOR = 4.0
BFLOAT16_FACTOR = 2.0


def randomize(model, seed):
    """Gives every parameter random values; initially norms are one and biases zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        module = name.split(".")[-2]
        if name.endswith("bias"):
            values = 0.2 * noise
        elif "norm" in module or "ln_" in module:
            values = 1 + 0.2 * noise
        elif any(part in name for part in ("embed", "wte", "wpe")):
            values = noise
        else:
            values = noise * parameter.shape[-1] ** -0.5
        parameter.data.copy_(values)


def decide_experts(model, seed):
    """Makes the choice of experts so clear that rounding cannot change it. A token's experts are
    written into the first elements of its embedding, which the routers read and to which layers add
    little.
    """
    import torch

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    if not routers:
        return
    generator = torch.Generator().manual_seed(seed)
    if type(routers[0]).__name__ == "DbrxRouter":
        routers, top_k = [router.layer for router in routers], model.config.ffn_config.moe_top_k
    else:
        top_k = routers[0].top_k
    num_experts = len(routers[0].weight)
    embedding = model.get_input_embeddings().weight.data
    # All from one group, if groups are chosen first.
    groups = getattr(routers[0], "num_group", None) or 1
    for i, row in enumerate(embedding):
        chosen = torch.randperm(num_experts // groups, generator=generator)[:top_k]
        chosen += i % groups * (num_experts // groups)
        row[:num_experts] *= 0.1
        row[chosen] += torch.linspace(4, 3, top_k)
    for router in routers:
        router.weight.data = 0.02 * router.weight.data
        router.weight.data[:, :num_experts] += torch.eye(num_experts)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(
                0.05 * torch.randn(num_experts, generator=generator)
            )
    for name, parameter in model.named_parameters():
        if re.search(r"(o_proj|down_proj|out_proj)(\.weight)?$", name):
            parameter.data[..., :num_experts, :] *= 0.05
        elif name.endswith("mlp.w2"):
            parameter.data[:, :num_experts] *= 0.05


def rotate_in_any_precision(modeling):
    """Replaces a rotation that rounds to float32 even in higher precisions."""
    import torch

    def rotate(x, frequencies):
        pairs = (x if x.dtype == torch.float64 else x.float()).unflatten(-1, (-1, 2))
        turned = torch.view_as_complex(pairs.contiguous()) * frequencies.unsqueeze(1)
        return torch.view_as_real(turned).flatten(3).type_as(x)

    modeling.apply_rotary_emb = lambda q, k, frequencies: (
        rotate(q, frequencies),
        rotate(k, frequencies),
    )


def exact_model(model):
    """A copy of the model that computes in float64 throughout."""
    import torch

    exact = copy.deepcopy(model).double()

    def norm_forward(module, x):
        gemma = "Gemma" in type(module).__name__
        eps = module.eps if gemma else module.variance_epsilon
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return (module.weight + 1 if gemma else module.weight) * (x * scale)

    def rotary_forward(module, x, position_ids, layer_type=None):
        prefix = "" if layer_type is None else f"{layer_type}_"
        # The frequencies are part of the model, with their float32 values.
        inv_freq = getattr(model.base_model.rotary_emb, f"{prefix}inv_freq").float().double()
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat((angles, angles), -1)
        scaling = getattr(module, f"{prefix}attention_scaling")
        return angles.cos() * scaling, angles.sin() * scaling

    def router_forward(module, x):
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), module.weight)
        scores = logits.softmax(-1)
        choice = scores
        if hasattr(module, "e_score_correction_bias"):
            scores = logits.sigmoid()
            choice = (scores + module.e_score_correction_bias).unflatten(-1, (module.num_group, -1))
            best = choice.topk(2).values.sum(-1).topk(module.topk_group).indices
            used = torch.zeros(choice.shape[:2]).scatter(-1, best, 1).bool()
            choice = choice.masked_fill(~used[..., None], -torch.inf).flatten(1)
        elif getattr(module, "topk_method", "greedy") != "greedy":
            choice = scores.unflatten(-1, (module.num_group, -1))
            best = choice.max(-1).values.topk(module.topk_group).indices
            used = torch.zeros(choice.shape[:2]).scatter(-1, best, 1).bool()
            choice = choice.masked_fill(~used[..., None], 0).flatten(1)
        experts = torch.topk(choice, module.top_k).indices
        weights = scores.gather(-1, experts)
        if getattr(module, "norm_topk_prob", not hasattr(module, "topk_method")):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(module, "routed_scaling_factor", 1.0), experts

    def complex_rotary_forward(module, x, position_ids):
        angles = position_ids[..., None].double() * module.inv_freq.float().double()
        return torch.polar(torch.full_like(angles, module.attention_scaling), angles)

    for module in exact.modules():
        if type(module).__name__ == "DeepseekV2RotaryEmbedding":
            module.forward = complex_rotary_forward.__get__(module)
            rotate_in_any_precision(sys.modules[type(module).__module__])
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_forward.__get__(module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = rotary_forward.__get__(module)
        elif type(module).__name__.lower().endswith("topkrouter"):
            module.forward = router_forward.__get__(module)
    return exact


def logits_of(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


@dataclass
class Reference:
    """Exact logits of ``ids`` and the bound for ours."""

    ids: list[int]
    logits: np.ndarray
    rounding: float
    bound: float

    def check(self, ours):
        """Fails if a logit differs from the exact one by more than the bound."""
        assert ours.shape == self.logits.shape and ours.dtype == np.float32
        error = float(np.max(np.abs(ours - self.logits)))
        if os.environ.get("ALLSPARK_PARITY_REPORT"):  # with pytest -s
            print(f"{error / self.rounding:.2f} of transformers' own error")
        assert error <= self.bound, f"error {error:.3g}, rounding {self.rounding:.3g}"
        return error


def reference_for(model, ids, factor):
    """``model`` in the precision to compare with; its weights are taken as exact."""
    exact = logits_of(exact_model(model), ids)
    rounding = float(np.max(np.abs(logits_of(model, ids) - exact)))
    # The bound itself. Rounding to a type with 24 or 8 bits, through some 20 operations, gives 5 to
    # 12 units here, and up to 120 with strong adapters and MKL's sums; a mistake in the exact model
    # gives thousands.
    unit = 2.0**-24 if factor == FLOAT32_FACTOR else 2.0**-8
    largest = np.max(np.abs(exact))
    assert 0 < rounding < min(1000 * unit, 0.4) * largest, f"{rounding:.3g} is not rounding"
    return Reference(list(ids), exact, rounding, factor * rounding)


def greedy(model, prompt, num_tokens):
    """transformers' greedy continuation, and the smallest lead of a chosen token over the next."""
    ids, lead = list(prompt), np.inf
    for _ in range(num_tokens):
        last = logits_of(model, ids)[-1]
        first, second = np.argsort(last)[-1], np.argsort(last)[-2]
        lead = min(lead, last[first] - last[second])
        ids.append(int(first))
    return ids[len(prompt) :], float(lead)
