"""paceline prepare KIND: turn what a user has into what training reads."""

import typer

app = typer.Typer(no_args_is_help=True, help="Prepare data once: text, speech.")
