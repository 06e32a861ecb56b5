"""Common parts of all loaders: access order, data ranks, sample views, mixtures, state, ledger."""
