"""Analyses of the approximation: the parts of the Fisher that estimators keep and drop, on held-out samples."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base": ["Analysis", "Findings", "Subject"],
        "fisher": ["CrossMoments", "FisherSimilarity"],
        "throughput": ["DeviceRecord", "Throughput"],
        "token_coupling": ["TokenCoupling"],
    },
)
