"""Shows what the attention of one model does, or of two side by side: numbers, and a page of them (`nlq explore`)."""
