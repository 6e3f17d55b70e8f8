"""How far rounding can take a network from the exact result, whatever the order of its additions.

A sum of n products in floating point is at most n + 1 units of roundoff of the sum of their
absolute values away from the exact one (Higham, Accuracy and Stability of Numerical Algorithms,
chapter 3). That holds for every order of additions, with or without fused operations, so a bound
made of it holds on every machine. It is carried from layer to layer, forward and backward.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import grapnet as gn

# How far two ways to add up to 80 products in float32 may be apart, for products around one: each
# may be 80 units of roundoff away from the exact sum.
SINGLE = 2 * 80 * 2.0**-24


def bounds(net: gn.GrapNet, x: Tensor, slope: Tensor) -> dict[str, float]:
    """Returns the largest rounding error of the output and of every gradient of a net.

    Args:
        net: its dtype says how the numbers are rounded; any backend of the sum may run it.
        x: the input, [..., sensory nodes].
        slope: the gradient that arrives at the output, in the shape of the output.

    Returns:
        One bound for the output, for the input's gradient and for every Parameter's gradient,
        under the names that the results of a net have.
    """
    found = plain_bounds(net.to_module(), x, slope)
    names = {"output": "output", "∂x": "∂x"}
    for t in range(len(net.transitions)):
        names[f"∂transitions.{t}.weight"] = f"∂{t}.weight"
        names[f"∂layers.{t + 1}.bias"] = f"∂{t}.bias"
    return {name: found[plain] for name, plain in names.items()}


def plain_bounds(model: nn.Sequential, x: Tensor, slope: Tensor) -> dict[str, float]:
    """Returns the largest rounding errors of a stack of linear layers and activations.

    The names are those of `bounds`, with the number of the linear layer: "∂0.weight".
    """
    unit = torch.finfo(next(model.parameters()).dtype).eps / 2
    exact = copy.deepcopy(model).cpu().double()

    value = torch.atleast_2d(x.detach().cpu().double()).flatten(0, -2)
    error = torch.zeros_like(value)
    inputs = []
    for module in exact:
        inputs.append((module, value, error))
        if isinstance(module, nn.Linear):
            value, error = _linear(module, value, error, unit)
        else:
            value, error = _elementwise(module, value, error, unit)
    found = {"output": _largest(error)}

    gradient = slope.detach().cpu().double().reshape(value.shape)
    error = torch.zeros_like(gradient)
    number = sum(isinstance(module, nn.Linear) for module in exact)
    for module, arrived, arrived_error in reversed(inputs):
        if isinstance(module, nn.Linear):
            number -= 1
            weight_error = _sum_of_products(arrived, arrived_error, gradient, error, unit)
            found[f"∂{number}.weight"] = _largest(weight_error)
            ones = torch.ones(len(gradient), 1, dtype=torch.float64)
            bias_error = _sum_of_products(ones, torch.zeros_like(ones), gradient, error, unit)
            found[f"∂{number}.bias"] = _largest(bias_error)
            weight = module.weight.detach()
            exactly = torch.zeros_like(weight)
            error = _sum_of_products(gradient.t(), error.t(), weight, exactly, unit)
            gradient = gradient @ weight
        else:
            slopes, slope_error = _elementwise(_derivative(module), arrived, arrived_error, unit)
            error = error * slopes.abs() + (gradient.abs() + error) * slope_error
            gradient = gradient * slopes
            error = error + unit * gradient.abs()
    found["∂x"] = _largest(error)
    return found


def _linear(module: nn.Linear, x: Tensor, error: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    weight = module.weight.detach()
    bias = module.bias.detach()
    products = _sum_of_products(x.t(), error.t(), weight.t(), torch.zeros_like(weight.t()), unit)
    terms = x.abs() @ weight.abs().t() + bias.abs()
    return x @ weight.t() + bias, products + unit * terms


def _sum_of_products(
    left: Tensor, left_error: Tensor, right: Tensor, right_error: Tensor, unit: float
) -> Tensor:
    """Returns the error of left.t() @ right, both [terms, …], where a product with 0 is exact."""
    terms = (left != 0).double().t() @ (right != 0).double()
    sizes = left.abs().t() @ right.abs()
    inherited = left_error.t() @ right.abs() + (left.abs() + left_error).t() @ right_error
    return inherited + (terms + 1) * unit * (sizes + inherited)


def _elementwise(
    function: Callable[[Tensor], Tensor], z: Tensor, error: Tensor, unit: float
) -> tuple[Tensor, Tensor]:
    """Returns φ(z) and its error: what an error of z makes of it, and a few roundings of its own.

    At a kink, such as that of the derivative of ReLU at 0, the error is the size of the step.
    """
    with torch.no_grad():
        value = function(z)
        above = (function(z + error) - value).abs()
        below = (function(z - error) - value).abs()
    return value, torch.maximum(above, below) + 8 * unit * (value.abs() + z.abs())


def _derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def derivative(z: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (found,) = torch.autograd.grad(function(z).sum(), z)
        return found

    return derivative


def _largest(errors: Tensor) -> float:
    if errors.numel() == 0:
        return 0.0
    return errors.max().item()
