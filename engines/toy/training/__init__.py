"""How the toy model was trained: an example of training this architecture with its cache and weight formats inside."""
