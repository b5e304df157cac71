"""The attention parts that the author of a saved model wrote. Saving a model replaces this file in its folder."""

PARTS: tuple = ()
