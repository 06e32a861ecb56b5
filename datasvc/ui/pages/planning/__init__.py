"""The page Planner: its form, the forecast of the caches, and the prediction of steps."""
