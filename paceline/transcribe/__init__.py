"""Speech into text, with what `paceline export` wrote or a model of transformers."""
