"""What a call of a module on another rank costs, and where the time goes."""
