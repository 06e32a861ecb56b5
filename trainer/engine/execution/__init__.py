"""Execution, over torch.distributed, of the operations that the negotiation has agreed on."""
