"""The `shoal` command: one sub-command a module, exit codes 0 done, 1 failed, 2 bad usage or manifest."""

import typer
from shoal.cluster.commands.validate import plan, validate

app = typer.Typer(name="shoal", no_args_is_help=True, help="Serve DeepSeek-V4.1-Flash on a cluster of roles.")
app.command()(validate)
app.command()(plan)


def main() -> None:
    """Run the command line."""
    app()
