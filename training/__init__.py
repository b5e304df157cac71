"""From data to a folder that AutoModel loads, and to the Hub: `nlq train`, `nlq compare`, `nlq convert`, `nlq publish`, ..."""
