"""`main`: the command line with all its commands."""

from __future__ import annotations

import sys

import click

from pyspark_lookup import __version__
from pyspark_lookup.cli import advise, host_commands, table_commands
from pyspark_lookup.errors import OptionError, PysparkLookupError, foreign_text


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="pyspark-lookup")
def _group() -> None:
    """Inspect lookup tables and this host's cache of them; check, warm and size that cache."""


for _command in (*table_commands.COMMANDS, *host_commands.COMMANDS, *advise.COMMANDS):
    _group.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name (None: the arguments of the process), and end the process with the command's exit code."""
    try:
        code = _group.main(arguments, standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        code = problem.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        code = 130
    except (PysparkLookupError, OSError) as problem:
        click.echo(f"error: {foreign_text(str(problem))}", err=True)
        code = 2 if isinstance(problem, OptionError) else 1
    sys.exit(code if isinstance(code, int) else 0)
