"""Ideas for attention, each an attention part in one file: `nlq new my_idea.py --from NAME` copies one."""
