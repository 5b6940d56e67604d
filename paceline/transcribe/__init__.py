"""Speech into text: by what `paceline export` wrote, or by any model of transformers for it."""
