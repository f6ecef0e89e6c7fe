"""What the toy model is taught and examined in: one module a task, each with a generator and an exact checker."""
