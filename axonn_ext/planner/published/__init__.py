"""Published runs and studies, and the planner's predictions for them."""
