"""Packs: several documents in one token block; the packer, the stored packs, and the order that counts them.

Groups: images of a similar aspect, in one batch; the stored aspects, and the order that sorts by them.
"""
