"""`paceline data smoke`: can a recipe's data be read, and how fast? Before training on it."""

import typer

from paceline.cli.arguments import JsonFlag, Overrides, Source

app = typer.Typer(no_args_is_help=True, help="Look at data before a run does.")


@app.callback()
def data() -> None:
    """Look at data before a run does."""


@app.command()
def smoke(
    source: Source,
    overrides: Overrides = None,
    seq_len: int | None = typer.Option(
        None, "--seq-len", min=1, help="Tokens per sample; the recipe's if not given."
    ),
    batch: int | None = typer.Option(
        None, "--batch", min=1, help="Samples per batch; the recipe's if not given."
    ),
    timeout: float = typer.Option(
        60.0, "--timeout", min=0.001, help="Longest wait for a file or a batch, in seconds."
    ),
    as_json: JsonFlag = False,
) -> None:
    """Read a recipe's data for some seconds: tokens/s, waits, and the file that hangs (exit 4).

    Example: paceline data smoke lm_tiny --seq-len 256 --batch 8 --timeout 60
    """
    from paceline.cli.talk import print_json, refusals_on_stdout

    words = list(overrides or [])
    words += [] if seq_len is None else [f"data.seq_len={seq_len}"]
    words += [] if batch is None else [f"train.micro_batch_size={batch}"]
    with refusals_on_stdout(as_json):
        from paceline.job import load_job
        from paceline.records.words import count, duration
        from paceline.train.smoke import smoke_data

        found = smoke_data(load_job(source, words), timeout)
    if as_json:
        print_json(found.model_dump_json(indent=2))
        return
    print(f"{found.units_per_s:,.0f} {found.unit}/s from {found.source}")
    batches = count(found.num_batches, "batch", "batches")
    opened = f"; {count(found.num_files, 'file')} opened" if found.num_files else ""
    first = f"the first after {duration(found.first_s)}"
    print(f"{batches} in {duration(found.elapsed_s)}, {first}{opened}")
    print(
        f"waits: p50 {duration(found.wait_p50_s)}, p95 {duration(found.wait_p95_s)}, longest"
        f" {duration(found.longest_s)} at {found.longest_at}"
    )
