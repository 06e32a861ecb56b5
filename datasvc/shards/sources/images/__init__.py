"""Sources of image files: folders, ImageNet as distributed, manifests."""
