"""The baselines with options that take little time."""

from experiments.baselines.dobi_svd import DobiSVDSearch
from experiments.baselines.energies import FastLRDSearch, LEMSSearch
from experiments.baselines.flora import FLORASearch

BASELINES = {
    "dobi_svd": DobiSVDSearch(num_epochs=3),
    "fastlrd": FastLRDSearch(),
    "flora": FLORASearch(num_epochs=2, population=10, num_generations=4),
    "lems": LEMSSearch(rank_multiple=1),
}
