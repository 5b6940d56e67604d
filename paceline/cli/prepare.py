"""paceline prepare KIND: turn what a user has into what training reads."""

from pathlib import Path

import typer

from paceline.cli.arguments import JsonFlag

app = typer.Typer(no_args_is_help=True, help="Prepare data once: text, speech.")


@app.command()
def text(
    source: str = typer.Argument(
        help="A file or folder of text, JSONL, parquet or arrow, ORG/NAME on the hub, or stdlib."
    ),
    out: Path = typer.Option(..., "--out", help="The folder that the token shards are written to."),
    tokenizer: str = typer.Option(
        "auto",
        "--tokenizer",
        help="bytes, a tokenizer.json, the folder that holds it, or ORG/NAME on the hub.",
        show_default="bytes",
    ),
    train_bpe: int | None = typer.Option(
        None, "--train-bpe", metavar="SIZE", help="First train a tokenizer with this many tokens."
    ),
    text_field: str = typer.Option(
        "text", "--text-field", help="The field or column that holds the text."
    ),
    val_fraction: float = typer.Option(
        0.02,
        "--val-fraction",
        min=0.0,
        max=0.99,
        help="Share of the documents kept apart for validation.",
    ),
    max_files: int | None = typer.Option(
        None, "--max-files", min=1, help="Read only this many files."
    ),
    workers: int | None = typer.Option(
        None, "--workers", min=1, help="Processes that tokenise; one per core if not given."
    ),
    as_json: JsonFlag = False,
) -> None:
    """Tokenise text into shards, which runs then read with data.source=DIR.

    Example: paceline prepare text stories.jsonl --out shards --train-bpe 8192
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout

    talk = ConsoleTalk()
    with refusals_on_stdout(as_json):
        from paceline.data.base import TextData
        from paceline.prepare.text import TextRequest, prepare_text
        from paceline.records.words import count

        settings = TextData(
            source=source,
            tokenizer=tokenizer,
            text_field=text_field,
            val_fraction=val_fraction,
            max_files="all" if max_files is None else max_files,
        )
        manifest = prepare_text(TextRequest(settings, train_bpe, workers), out, talk.say)
    if as_json:
        print_json(manifest.to_json())
        return
    for split in ("train", "val"):
        ours = [shard for shard in manifest.shards if shard.split == split]
        num_tokens = sum(shard.num_tokens for shard in ours)
        print(f"{split}: {num_tokens:,} tokens in {count(len(ours), 'shard')}")
    print(f"tokenizer: {manifest.tokenizer}, {manifest.vocab_size:,} ids, {manifest.dtype}")
    talk.say(f"to train on it: data.source={out} model.vocab_size={manifest.vocab_size}")
