"""The stacks that people fine-tune with, over ranks, beside one plain process: ``make stacks``."""
