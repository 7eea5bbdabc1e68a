"""The steps: a module each, with ``run(options) -> figures``; :mod:`tools.gpu_day.plan` says what each one shows."""
