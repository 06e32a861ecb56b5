"""Packs: several documents in one token block; the packer, the stored packs, and the order that counts them."""
