"""Scripts written after what the original library's public examples do: their arguments, their order of calls."""
