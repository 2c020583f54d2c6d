"""Methods outside the package: each is a class, with its options next to it in a folder that Hydra searches."""
