"""From data to a folder that AutoModel loads: `nlq train`, `nlq compare`, `nlq convert`, `nlq publish` and the rest of `nlq`."""
