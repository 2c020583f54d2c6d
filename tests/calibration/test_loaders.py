import random
from itertools import zip_longest

import pytest
import torch
from torch import nn
from torch.utils import data as of_torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

import facts
from facts.calibration.data import Data
from facts.utils.batches import NumberedBatches
from tests.networks import image_batches, make_model, numbered
from tests.toys import Net, linears

NUMBERS = torch.arange(200)
UNEQUAL = NUMBERS.split([8, *[16] * 11, 16])
SAMPLES, EVEN = TensorDataset(NUMBERS), range(0, 200, 2)


class Shuffled(Sampler):
    def __iter__(self):
        return iter(random.sample(range(200), 200))

    def __len__(self):
        return 200


class Repeated:
    """Batches of indices that begin again, as timm's loader of several epochs has them."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while True:
            yield from self.batches


class Halved(DataLoader):
    def __iter__(self):
        return ([numbers / 2] for (numbers,) in super().__iter__())


class OneIterator:
    """An iterable that is no iterator, but gives the same one each time."""

    def __init__(self, batches):
        self.iterator = iter(batches)

    def __iter__(self):
        return self.iterator


class Stream(OneIterator, IterableDataset):
    """Samples for a loader."""


class Buffered:
    def __iter__(self):
        buffer = torch.zeros(50)
        for part in NUMBERS.split(50):
            yield buffer.copy_(part)


def without_some(part):
    return None if part[0] == 40 else part[part % 7 > 0]


def endless():
    loader = DataLoader(SAMPLES, 16)
    object.__setattr__(loader, "batch_sampler", Repeated([part.tolist() for part in NUMBERS.split(16)]))
    return loader


LOADERS = {
    "own generator": (lambda: DataLoader(SAMPLES, 16, shuffle=True, generator=torch.Generator()), 200),
    "last one dropped": (lambda: DataLoader(SAMPLES, 64, shuffle=True, drop_last=True), 192),
    "a number": (lambda: DataLoader(SAMPLES, 16, sampler=of_torch.RandomSampler(SAMPLES, num_samples=32)), 32),
    "subset": (lambda: DataLoader(SAMPLES, 16, sampler=of_torch.SubsetRandomSampler(EVEN, torch.Generator())), 100),
    "python": (lambda: DataLoader(SAMPLES, 16, sampler=Shuffled()), 200),
    "batches": (lambda: DataLoader(UNEQUAL, batch_size=None, shuffle=True, generator=torch.Generator()), 200),
    "batches of one": (lambda: DataLoader(UNEQUAL, batch_size=1, collate_fn=lambda items: items[0]), 200),
    "endless": (endless, 200),
    "own code": (lambda: Halved(SAMPLES, 16), 200),
    "one buffer": (Buffered, 200),
    "once, an iterator": (lambda: iter(NUMBERS.split(16)), 200),
    "once, of one iterator": (lambda: OneIterator(NUMBERS.split(16)), 200),
    "once, a stream": (lambda: DataLoader(Stream(NUMBERS), 16), 200),
    "some missing": (lambda: NumberedBatches(UNEQUAL, without_some, None, range(13)), 157),
}
SHUFFLED = {"own generator", "last one dropped", "a number", "subset", "python", "batches"}


def numbers_of(data):
    return [number for numbers, _ in data for number in numbers.tolist()]


@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_is_in_one_part_the_same_in_each_pass_and_process(name):
    make, expected = LOADERS[name]
    loader, state, passes = make(), torch.random.get_rng_state(), []
    for number in range(2):
        data = Data.of(make() if number and name.startswith("once") else loader, nn.Identity())
        assert Data.of(data, nn.Identity()) is data
        passes.append([numbers_of(part) for part in data.divided()])
        again = [[list(part[rank::2]) for rank in range(2)] for part in data.divided()]
        for part, shares in zip(passes[-1], again, strict=True):
            dealt = [batch for pair in zip_longest(*shares) for batch in pair if batch]
            assert numbers_of(dealt) == part or name == "some missing"
    kept, held_out = passes[0]
    assert passes[0] == passes[1] and (kept != sorted(kept)) == (name in SHUFFLED)
    assert len(kept) + len(held_out) == len({*kept, *held_out}) == expected
    assert min(32, expected // 4) - 8 <= len(held_out) <= expected // 4
    if name not in ("own code", "once, a stream"):  # draws elsewhere stay the same
        assert torch.random.get_rng_state().equal(state)


def test_a_sample_that_is_drawn_twice_is_held_out_twice():
    sampler = of_torch.WeightedRandomSampler(torch.ones(200), 1000)
    kept, held_out = Data.of(DataLoader(SAMPLES, 16, sampler=sampler), nn.Identity()).divided()
    seen = [{*numbers_of(part)} for part in (kept, held_out)]
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) > 190 and sum(kept.sizes + held_out.sizes) == 1000


def test_a_batch_that_is_an_item_counts_its_samples():
    parts = UNEQUAL, NUMBERS.split(50)
    loaders = (DataLoader(each, batch_size=1, collate_fn=lambda items: items[0]) for each in parts)
    unequal, equal = (Data.of(loader, nn.Identity()) for loader in loaders)
    assert len(unequal) == 13 and [len(part) for part, _ in equal.few_samples(60)] == [50, 50]


@pytest.mark.parametrize("data", [[(part, None) for part in NUMBERS.split(20)], DataLoader(SAMPLES, 20)])
def test_few_samples_are_from_everywhere(data):
    """Those of a dataset in order of classes would otherwise be of its first classes."""
    data = Data.of(data, nn.Identity())
    assert [part[0].item() for part, _ in data.few_samples(61)] == [0, 40, 100, 140]
    assert len(data.few_samples(20)) == 1 and len(data.few_samples(1000)) == 10


def test_shares_have_keys_of_their_own():
    model, batches = make_model(), image_batches([1] * 40)
    groups = Data.of(numbered(batches, key="images"), model)
    assert len({groups.content_key, *(part.content_key for part in groups.divided())}) == 3
    assert groups[:3].content_key != groups.content_key


class Opened(Dataset):
    """Samples of a file that each worker opens."""

    file = None

    def __len__(self):
        return 40

    def __getitem__(self, number):
        return self.file[number]


def open_file(worker):
    get_worker_info().dataset.file = torch.arange(40)


def test_workers_prepare_the_dataset_of_the_loader():
    data = Data.of(DataLoader(Opened(), 8, num_workers=1, worker_init_fn=open_file), nn.Identity())
    assert [numbers[0].item() for numbers, _ in data] == [*range(0, 40, 8)]
    assert data.first[0].tolist() == [*range(8)]


@pytest.mark.parametrize("held_out", [(), [], [GOOD := torch.ones(4, 3, 8, 8, dtype=torch.float64)], GOOD.numpy()])
def test_held_out_data_may_be_none_or_an_array(held_out):
    prepared = facts.prepare(make_model(), image_batches([8, 8]), held_out=held_out)
    assert len(prepared.data) == 2 and sum(prepared.held_out.sizes) == (4 if len(held_out) else 0)


def test_texts_of_other_forms_are_read():
    """The second batch does not show which tokens come from the data."""
    words = torch.arange(16).reshape(2, 8)
    data = [{"input_ids": words[:1]}, {"input_ids": words, "token_type_ids": 0 * words}]
    layers = {"words": nn.Embedding(16, 32), **linears("first", "second", size=32)}
    network = Net(lambda net, inputs: net.second(net.first(net.words(inputs["input_ids"]))), **layers)
    assert facts.prepare(network.eval(), data, outputs="features").parts
