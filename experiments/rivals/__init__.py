"""Methods outside the package: each a class, with its options beside it in a folder that Hydra searches."""
