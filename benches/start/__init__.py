"""What a user waits for before the second step: imports, ``smp.init`` and the first step."""
