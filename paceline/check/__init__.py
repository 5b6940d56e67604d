"""Are these machines fit? `paceline check`: flow asks, rank measures, judge decides."""
