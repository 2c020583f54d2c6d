"""Detection and segmentation with OpenMMLab."""
