"""Tokens that do not come from the data, wherever they stand, and several sequences of one network."""

import pytest
import torch
from torch import nn

import facts
from facts.parts.tokens import Merging
from tests.parts.test_tokens import batches, bert, spread, texts, vit
from tests.toys import Net


def test_protected_tokens_can_be_said():
    prepared = facts.prepare(vit(), batches(), parts="tokens", protected=5)
    assert {part.protected for part in prepared.parts.values()} == {5}


class Prompted(nn.Module):
    """Tokens of its own stand in front of those of the data, between them, and behind; two lists of blocks see them."""

    def __init__(self):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True) for _ in range(4)]
        self.early, self.late = nn.ModuleList(layers[:2]), nn.ModuleList(layers[2:])
        self.own, self.head = nn.Parameter(torch.randn(6, 16)), nn.Linear(16, 4)

    def hidden(self, x):
        one, two, three = (each.expand(len(x), -1, -1) for each in self.own.split((1, 2, 3)))
        x = torch.cat([one, x[:, :8], two, x[:, 8:], three], dim=1)
        for block in (*self.early, *self.late):
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.hidden(x)[:, 0])


def test_tokens_that_do_not_come_from_the_data_are_never_merged(tmp_path):
    model, data = spread(Prompted()), batches((24, 16))
    prepared = facts.prepare(model, data, parts="tokens")
    assert {part.places for part in prepared.parts.values()} == {(-3, -2, -1, 0, 9, 10)}
    result = facts.compress(prepared, search="uniform", ratio=0.5)
    facts.save_compressed(result, tmp_path)
    for network in (result.model, facts.load_compressed(tmp_path, spread(Prompted())).model):
        rows = network.hidden(data[0][0])
        for own in (0, 9, 10, 27, 28, 29):
            assert ((rows == rows[:, own, None]).all(dim=-1).sum(dim=1) == 1).all()
        assert all(len(each.unique(dim=0)) < 30 for each in rows)


def test_of_one_sample_of_integers_nothing_can_be_told():
    model, one = bert(), texts()[0]
    alike = [{name: each[:1].expand(4, *each.shape[1:]) for name, each in one.items()}] * 6
    with pytest.raises(ValueError, match="only one sample of integers is known: say how many there are at the front"):
        facts.prepare(model, alike, parts="tokens")
    assert facts.prepare(model, alike, parts="tokens", protected=1).parts


def test_two_calls_of_a_backbone_are_two_sequences(monkeypatch):
    """It is called twice for each sample."""
    seen, slopes = set(), Merging.slopes

    def noted(self, batch, decomposition):
        seen.add(tuple(batch.x.shape[1:]))
        return slopes(self, batch, decomposition)

    monkeypatch.setattr(Merging, "slopes", noted)
    modules = {"backbone": vit(num_classes=0, depth=2), "head": nn.Linear(48, 4)}
    siamese = Net(lambda net, x: net.head(net.backbone(x[:, 0]) - net.backbone(x[:, 1])), **modules)
    result = facts.compress(spread(siamese), batches((2, 3, 64, 64)), parts="tokens", ratio=0.6)
    assert seen == {(16, 48)} and any(result.plan.values())
