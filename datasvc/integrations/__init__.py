"""Adapters of other frameworks, a module for each: `from datasvc.integrations.lightning import ...`.

A module imports its framework; this package and the rest of datasvc import none. The modules use only public names of
the frameworks, and tests run each of them with the real package, killed and resumed.
"""
