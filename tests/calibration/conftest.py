import pytest
import torch

from tests.networks import image_batches, make_model


@pytest.fixture
def model():
    return make_model(torch.float32)


@pytest.fixture
def batches():
    return image_batches([3, 3, 1], dtype=torch.float32)
