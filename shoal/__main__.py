"""`python -m shoal` is the `shoal` command."""

from shoal.cluster.cli import main

if __name__ == "__main__":
    main()
