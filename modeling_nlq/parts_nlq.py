"""The parts of the model's author, which saving a model writes here: subclasses of `AttentionPart`."""

PARTS: tuple = ()
