"""Adapters of peft over pipeline ranks, beside peft in one process."""
