"""The `shoal` command: one sub-command a module, exit codes 0 done, 1 failed, 2 bad usage or manifest."""

import typer
from shoal.cluster.commands import bench
from shoal.cluster.commands.chat import chat, generate
from shoal.cluster.commands.demo import demo
from shoal.cluster.commands.experiment import experiment
from shoal.cluster.commands.operate import down, status, up
from shoal.cluster.commands.trace import trace_app
from shoal.cluster.commands.validate import plan, validate

app = typer.Typer(
    name="shoal",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve DeepSeek-V4.1-Flash on a cluster of roles: encode, prefill, decode, and a store beside them.",
)
for command in (up, down, status, chat, generate, validate, plan, demo, experiment):
    app.command()(command)
bench.register(app)
app.add_typer(trace_app)


def main() -> None:
    """Run the command line."""
    app()
