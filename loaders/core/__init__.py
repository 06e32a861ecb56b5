"""What every loader shares: order, data ranks, sample views, mixtures, state, ledger."""
