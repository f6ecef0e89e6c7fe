"""The toy's examination: accuracy over the served path, what each cached kind is worth, and how good drafts are."""
