"""Sources of image files: folders, manifests, and ImageNet as distributed."""
