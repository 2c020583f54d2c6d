import pytest
import torch
from torch import nn

from facts.moments import GradGram, InputGram, collect_moments
from facts.moments.batch import split_samples
from facts.moments.data_pass import DataPass
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import image_batches, make_model


class InPlace(nn.Module):
    """Changes the input and the output of a layer after it ran, as residual and activation code may do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        x = self.first(x)
        y = torch.relu_(self.layer(x))
        x += y
        return x.mean(dim=1)


@pytest.mark.parametrize("with_grads", [True, False])
def test_changes_in_place_do_not_reach_the_moments(with_grads):
    model = InPlace().double()
    x, labels = torch.randn(3, 4, 12, dtype=torch.float64), torch.tensor([0, 1, 2])
    wanted = [InputGram(), GradGram()] if with_grads else [InputGram()]
    moments = collect_moments(model, {"layer": model.layer}, [(x, labels)], wanted)["layer"]
    hidden = model.first(x).detach()
    inputs = hidden.flatten(0, 1)
    torch.testing.assert_close(moments[InputGram()][0], inputs.T @ inputs)
    if with_grads:
        y = model.layer(hidden).detach().requires_grad_()
        (g,) = torch.autograd.grad(summed_cross_entropy((hidden + y.relu()).mean(dim=1), labels), y)
        torch.testing.assert_close(moments[GradGram()][0], g.flatten(0, 1).T @ g.flatten(0, 1))


def test_the_model_is_as_it_was_after_an_error():
    model = make_model().train()
    model.grid.eval()
    model.head.bias.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]

    def interrupted(outputs, targets):
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        raise KeyboardInterrupt

    data_pass = DataPass(model, select_layers(model).layers, lambda *_: None, interrupted, torch.float32, True)
    with pytest.raises(KeyboardInterrupt):
        data_pass.run(image_batches([2]), "calibration")
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("shape", [(7, 4, 5), (5,)])
def test_split_samples_names_the_layer_it_cannot_split(shape):
    with pytest.raises(ValueError, match=r"layer blocks\.0 sees a tensor of shape .* for a batch of 2 samples"):
        split_samples(torch.zeros(shape), 2, "blocks.0")
