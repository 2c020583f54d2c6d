"""Detection and segmentation, by OpenMMLab."""
