"""The page in the browser: data sets, models, runs and nodes, read-only, from one process (`datasvc ui`).

A page is a function that returns values (`web.page.Page`) and a template that shows them. The same values are its
JSON twin, below `/api`. Nothing that a page does changes a repository or a node.
"""
