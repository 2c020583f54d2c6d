"""The rivals with options that take little time."""

from experiments.rivals.search.dobi_svd import DobiSVDSearch
from experiments.rivals.search.fastlrd import FastLRDSearch
from experiments.rivals.search.flora import FLORASearch
from experiments.rivals.search.lems import LEMSSearch

RIVALS = {
    "dobi_svd": DobiSVDSearch(num_epochs=3),
    "fastlrd": FastLRDSearch(),
    "flora": FLORASearch(num_epochs=2, population=10, num_generations=4),
    "lems": LEMSSearch(rank_multiple=1),
}
